"""One of three peers computes for a second longer than the others: `rounds` and `status` of all three name it."""

from __future__ import annotations

import time

import pytest

from e2e.fleet import Fleet, normal
from e2e.swarm import Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LATE_SECONDS = 1.0


def test_all_name_the_peer_that_joins_late_and_it_does_too(swarm: Swarm) -> None:
    daemons = swarm.daemons(3, args=["--listen", "/ip4/127.0.0.1/tcp/0"])
    with Fleet(daemons, normal(3, 10_000)) as fleet:
        for _ in range(5):
            pending = [run.average(timeout=30.0, wait=False) for run in fleet.runs[:2]]
            due = time.monotonic() + LATE_SECONDS
            eventually(lambda due=due: time.monotonic() >= due, "the slow peer to have computed")
            pending.append(fleet.runs[2].average(timeout=30.0, wait=False))
            outcomes = [pending_round.result() for pending_round in pending]
        slow = fleet.clients[2].peer_id
        for daemon, outcome in zip(daemons, outcomes, strict=True):
            peer, seconds = outcome.waits["matchmaking"]
            print(outcome.waits)
            assert peer == slow
            assert seconds >= 0.8 * LATE_SECONDS
            assert f"s for ..{slow[-8:]} to join" in daemon.cli("rounds").stdout
            whom = "this peer" if peer == fleet.clients[daemons.index(daemon)].peer_id else f"..{slow[-8:]}"
            assert f"s for {whom} to join" in daemon.cli("status").stdout
