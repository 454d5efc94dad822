"""Real daemons, the clock of one of which is off: rounds are exact all the same, and `status` says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.fleet import Fleet, normal
from e2e.shifted import SHIFT
from e2e.swarm import CLI, DaemonProcess, Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]
TESTS = Path(__file__).resolve().parents[1]
ROUNDS = 20
AMOUNTS = {60.0: "1 minute", 7200.0: "2 hours", 86_400.0: "1 day"}


def warnings(daemon: DaemonProcess) -> str:
    """What `status` warns of."""
    return "; ".join(daemon.json("status")["warnings"])


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize("sign", [-1.0, 1.0], ids=["behind", "ahead"])
@pytest.mark.parametrize("seconds", AMOUNTS)
def test_rounds_with_one_whose_clock_is_off_are_exact(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, seconds: float, sign: float, others: int
) -> None:
    daemons = swarm.daemons(others, args=LISTEN)
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    monkeypatch.setenv(SHIFT, str(sign * seconds))
    monkeypatch.setattr("e2e.swarm.CLI", (*CLI[:-1], "from e2e.shifted import main; main()"))
    off = swarm.daemon(join=[daemons[0].address], args=LISTEN)
    monkeypatch.setattr("e2e.swarm.CLI", CLI)
    with Fleet([*daemons, off], normal(others + 1, 10_000), codec="fp32") as fleet:
        for _ in range(ROUNDS):
            outcomes = [pending.result() for pending in fleet.start([1.0] * (others + 1), timeout=30.0)]
            assert len(outcomes[0].contributors) == others + 1
            fleet.check(dict(enumerate(outcomes)), 1e-6)
            for value, tensor in zip(fleet.values, fleet.tensors, strict=True):
                value.copy_(tensor)
        said = f"this machine's clock is {AMOUNTS[seconds]}"
        direction = "ahead of" if sign > 0 else "behind"
        eventually(lambda: f"{said} {direction}" in warnings(off), "the warning")
        if others > 1:
            assert all("clock" not in warnings(daemon) for daemon in daemons)


def test_a_clock_that_is_off_by_more_than_a_day_is_named(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons = swarm.daemons(2, args=LISTEN)
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    monkeypatch.setenv(SHIFT, str(400 * 86_400.0))
    monkeypatch.setattr("e2e.swarm.CLI", (*CLI[:-1], "from e2e.shifted import main; main()"))
    off = swarm.daemon(join=[daemons[0].address], args=LISTEN)
    monkeypatch.setattr("e2e.swarm.CLI", CLI)
    eventually(lambda: "this machine's clock is 1 year and 5 weeks ahead of" in warnings(off), "the warning")
