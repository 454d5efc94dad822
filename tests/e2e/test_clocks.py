"""Real daemons, the clock of one of which is off by any amount: rounds are exact all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.fleet import Fleet, normal
from e2e.shifted import SHIFT
from e2e.swarm import CLI, Swarm

pytestmark = pytest.mark.slow

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]
TESTS = Path(__file__).resolve().parents[1]
ROUNDS = 20
AMOUNTS = (7200.0, 86_400.0, 400 * 86_400.0)


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
