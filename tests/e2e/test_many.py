"""Thirty-two daemons on one machine, in groups of eight."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from e2e.fleet import Fleet, normal
from e2e.swarm import Swarm, eventually

DAEMONS, GROUP_SIZE, CALLS = 32, 8, 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_thirty_two_daemons_average_in_full_groups(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("e2e.swarm.ChildProcess.forks", False)
    listen, began = ["--listen", "/ip4/127.0.0.1/tcp/0"], time.monotonic()
    first = swarm.daemon(args=listen)
    others = [swarm.daemon(join=[first.address], args=listen, wait=False) for _ in range(DAEMONS - 1)]
    for daemon in others:
        eventually(lambda daemon=daemon: daemon.states, f"{daemon.home.name}'s first state", 300.0)
    started = time.monotonic() - began
    with Fleet([first, *others], normal(DAEMONS, 10_000), 120.0, group_size=GROUP_SIZE) as fleet:
        ready = time.monotonic() - began
        print(f"started in {started:.1f} s, know each other after {ready:.1f} s")
        full = 0
        for number in range(CALLS):
            began = time.monotonic()
            outcomes = [one.result() for one in fleet.start([1.0] * DAEMONS)]
            groups = Counter((outcome.round, outcome.digest) for outcome in outcomes if outcome.ok)
            full += sorted(groups.values()) == [GROUP_SIZE] * (DAEMONS // GROUP_SIZE)
            sizes = sorted(groups.values(), reverse=True)
            print(f"call {number}: groups of {sizes}, {time.monotonic() - began:.2f} s")
    assert full == CALLS
