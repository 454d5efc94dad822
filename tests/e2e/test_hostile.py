"""Two of four real daemons turn hostile while a group is sought; the other two average all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.fleet import Fleet, normal
from e2e.swarm import CLI, Swarm
from equipoise.averaging.matchmaking.moshpit import rank
from equipoise.averaging.matchmaking.seeking import HOLD_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]
TESTS = Path(__file__).resolve().parents[1]

TIMEOUT = 60.0


@pytest.mark.parametrize("ways", [("hold", "hold"), ("hold", "flood"), ("flood", "flood")], ids="-".join)
def test_two_that_hold_and_flood_cost_the_others_a_wait_and_no_round(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, ways: tuple[str, str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    monkeypatch.setattr("e2e.swarm.CLI", (*CLI[:-1], "from e2e.hostile import main; main()"))
    with Fleet(swarm.daemons(4, args=LISTEN), normal(4, 100_000), codec="fp32") as fleet:
        # They convene first, and keep what they are given.
        order = sorted(range(4), key=lambda member: rank("0", fleet.clients[member].peer_id))
        for member, way in zip(order, ways, strict=False):
            (fleet.daemons[member].home / way).touch()
        honest = order[len(ways) :]
        for number in range(2):
            pending = [fleet.runs[member].average(timeout=TIMEOUT, wait=False) for member in honest]
            outcomes = {member: one.result() for member, one in zip(honest, pending, strict=True)}
            print(f"round {number}: {outcomes[honest[0]].seconds['total']:.1f} s")
            assert set(outcomes[honest[0]].contributors) == {fleet.clients[one].peer_id for one in honest}
            fleet.check(outcomes, 1e-6)
            for member in honest:
                fleet.values[member].copy_(fleet.tensors[member])
                waited = outcomes[member].seconds["matchmaking"]
                assert waited < len(ways) * (HOLD_SECONDS + 10.0)
