"""The drivers of a run's purposes: when they join, and what an agreement that others refuse leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.peer.daemon.session import RunDrivers
from equipoise.peer.errors import Refused
from equipoise.peer.purposes import AVERAGE, STEP


class Router:
    """Joins and leaves by name."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    async def join(self, spec: Any, observes: bool) -> Any:
        return SimpleNamespace(spec=spec, observes=observes)

    async def leave(self, run_driver: Any, reason: str) -> None:
        self.left.append(run_driver)


async def test_what_two_callers_find_refused_is_undone_once() -> None:
    router, specs = Router(), {AVERAGE: "averages", STEP: "steps"}
    drivers = RunDrivers(router, "digits", specs, False)  # type: ignore[arg-type]
    await drivers.agree("agreed", True)  # type: ignore[arg-type]
    first = await drivers.use(STEP)
    assert (first.spec, drivers.purpose) == ("agreed", STEP)
    await drivers.disagree(first)
    assert (drivers.specs[STEP], drivers.purpose, drivers.in_use) == ("steps", AVERAGE, {})
    second = await drivers.use(STEP)
    await drivers.disagree(first)
    assert drivers.in_use == {STEP: second}
    drivers.close()
    with pytest.raises(Refused, match="'digits' is being left"):
        await drivers.get(AVERAGE)
    await drivers.leave("bye")
    assert router.left == [first, first, second]
