"""Some of the daemons of a run turn hostile; the others average all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from e2e.fleet import Fleet, normal
from e2e.swarm import CLI, Swarm, eventually
from equipoise.averaging.manifest import MAX_ROUND
from equipoise.averaging.matchmaking.membership import MISSES
from equipoise.averaging.matchmaking.topology import rank
from equipoise.averaging.outcome import Idle
from equipoise.averaging.timing import HOLD_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]
TESTS = Path(__file__).resolve().parents[1]

TIMEOUT = 60.0

SETTLE_SECONDS, LYING_SECONDS, HONEST_SECONDS = 5.0, 25.0, 10.0
"""Rounds of the honest peers are counted for so many seconds while others lie, before and after that, each time after
so many seconds to settle."""


@pytest.mark.parametrize("ways", [("hold", "hold"), ("hold", "flood"), ("flood", "flood")], ids="-".join)
def test_two_that_hold_and_flood_cost_the_others_a_wait_and_no_round(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, ways: tuple[str, str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    monkeypatch.setattr("e2e.swarm.CLI", (*CLI[:-1], "from e2e.hostile import main; main()"))
    with Fleet(swarm.daemons(4, args=LISTEN), normal(4, 100_000), codec="fp32") as fleet:
        # They coordinate first, and keep what they are given.
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


@pytest.mark.parametrize(
    ("liars", "ways", "mates"),
    [
        (1, ("lie",), False),
        (2, ("lie",), False),
        (1, ("lie", "silent"), False),
        (2, ("lie", "silent"), False),
        (3, ("lie",), True),
    ],
    ids=["1", "2", "1 silent", "2 silent", "3 that took part"],
)
def test_lies_about_round_and_progress_stop_no_peer(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...], liars: int, mates: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    monkeypatch.setattr("e2e.swarm.CLI", (*CLI[:-1], "from e2e.hostile import main; main()"))
    values = torch.ones(1000)
    with Fleet(swarm.daemons(3 + liars, args=LISTEN), normal(3 + liars, 1000), codec="fp32") as fleet:
        honest = {client.peer_id for client in fleet.clients[:3]}
        for run in fleet.runs:
            run.progress()  # Joins those that step.
        for run in fleet.runs:
            eventually(lambda run=run: run.state == Idle(2 + liars), "all that step to have met")

        def step(seconds: float, least: int = 1) -> float:
            began, rounds = time.monotonic(), 0
            while rounds < least or time.monotonic() < began + seconds:
                rounds += 1
                for run in fleet.runs[:3]:
                    run.accumulate({"w": values}, weight=1.0)
                pending = [run.step(timeout=TIMEOUT, wait=False) for run in fleet.runs[:3]]
                for outcome in [pending_round.result() for pending_round in pending]:
                    assert outcome.ok, outcome.reason
                    assert outcome.contributors.keys() == honest
            return rounds / (time.monotonic() - began)

        def rate(seconds: float) -> float:
            step(SETTLE_SECONDS, MISSES + 1)  # Peers that give nothing are waited for so often.
            return step(seconds)

        if mates:
            for run in fleet.runs[:3]:
                run.accumulate({"w": values}, weight=1.0)
            outcomes = [one.result() for one in [run.step(timeout=TIMEOUT, wait=False) for run in fleet.runs]]
            assert all(outcome.ok and len(outcome.group) == 3 + liars for outcome in outcomes)
        rates = [rate(HONEST_SECONDS)]
        for daemon, run in zip(fleet.daemons[3:], fleet.runs[3:], strict=True):
            for way in ways:
                (daemon.home / way).touch()
            run.accumulate({"w": values}, weight=1.0)  # Has it published.
        eventually(lambda: _in_the_last_round(fleet) == liars, "the lies to be published")
        rates.append(rate(LYING_SECONDS))
        progress = fleet.runs[0].progress(target=100.0)
        assert progress.swarm <= progress.local + liars * 100.0 / 3
        for daemon in fleet.daemons[3:]:
            daemon.kill()
        rates.append(rate(HONEST_SECONDS))
        print(f"{liars} of {ways}: " + ", ".join(f"{rate:.1f}" for rate in rates) + " rounds a second")


def _in_the_last_round(fleet: Fleet) -> int:
    return len({row.peer for row in fleet.clients[0].peers() if row.round == MAX_ROUND})
