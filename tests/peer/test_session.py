"""The figures of a gossip run in `status`."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest

from equipoise.averaging.outcome import Outcome
from equipoise.peer.session import OVERTIME, Session, _exchanges


def test_exchanges_in_doubt_are_counted_beyond_the_history() -> None:
    last = deque([Outcome(ok=True, reason="", apart=0.25), Outcome(ok=True, reason="", apart=None)], maxlen=2)
    run = SimpleNamespace(history=last, others=3, rounds_ok=5000, rounds_failed=9, rounds_in_doubt=2)
    told = _exchanges(run)  # type: ignore[arg-type]
    assert (told.partners, told.ok, told.failed, told.in_doubt) == (3, 5000, 9, 2)
    assert told.spread == pytest.approx(0.25), "an exchange with a newcomer tells no distance"


@pytest.mark.parametrize(
    ("ends", "ok", "in_doubt"),
    [
        (Outcome(ok=False, reason="timed out in phase commit", in_doubt=True), False, True),
        (Outcome(ok=False, reason="timed out in phase scatter"), False, False),
        (Outcome(ok=True, reason="mean over 2 of 2 members"), True, False),
        (None, False, True),
    ],
    ids=["voted", "not voted", "ended just then", "stuck"],
)
async def test_a_round_that_the_session_gives_up_says_whether_it_is_in_doubt(
    ends: Outcome | None, ok: bool, in_doubt: bool
) -> None:
    ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    async def exchange() -> Outcome:
        return await ended

    session = Session.__new__(Session)
    session.name = "digits"
    driver = SimpleNamespace(withdraw=lambda reason: None if ends is None else ended.set_result(ends))
    session._run_drivers = {"average": driver}  # type: ignore[dict-item]
    found = await session._within(asyncio.create_task(exchange()), -OVERTIME)
    assert (found.ok, found.in_doubt) == (ok, in_doubt)
    assert ends is None or found == ends
