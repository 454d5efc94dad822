"""Rounds over half a world: 300 ms there and back, and packets that stand still for a second now and then."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from contracts.run import join_all, together
from e2e.distance import FarNetwork
from e2e.netns import available
from e2e.swarm import Swarm
from equipoise.peer import Outcome, Run, connect

MEMBERS, ROUNDS, VALUES = 4, 50, 100_000

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(available() != "", reason=available() or "available"),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="no TUN devices"),
]


def take_part(run: Run, tensor: torch.Tensor, own: float, values: dict[str, float]) -> list[Outcome]:
    """Average again and again until all rounds are over; returns the outcomes, the last perhaps without company."""
    outcomes: list[Outcome] = []
    while not outcomes or outcomes[-1].round < ROUNDS - 1:
        tensor.fill_(own)
        outcome = run.average(timeout=30.0)
        outcomes.append(outcome)
        if not outcome.ok:
            break
        mean = sum(values[peer] for peer in outcome.contributors) / len(outcome.contributors)
        torch.testing.assert_close(tensor, torch.full((VALUES,), mean))
    return outcomes


def test_over_300_ms_and_stalls_every_round_succeeds_and_nobody_is_taken_for_dead(swarm: Swarm) -> None:
    with FarNetwork(MEMBERS, delay=0.15, stall=1.0) as network:
        first = swarm.daemon(prefix=network.hosts[0].command([]))
        rest = [swarm.daemon(join=[first.address], prefix=host.command([])) for host in network.hosts[1:]]
        clients = [connect(daemon.home) for daemon in (first, *rest)]
        values = {client.status().peer_id: float(at) for at, client in enumerate(clients)}
        tensors = [torch.zeros(VALUES) for _ in clients]
        runs = join_all(clients, [[tensor] for tensor in tensors], "far")
        told = together(
            *(partial(take_part, *one, values) for one in zip(runs, tensors, values.values(), strict=True))
        )
        for client in clients:
            client.close()
    rounds: dict[int, list[Outcome]] = {}
    for outcomes in told:
        # One whom a stall kept from the last group finds that all others have finished.
        alone = not outcomes[-1].ok and outcomes[-1].round >= ROUNDS - 1
        for outcome in outcomes[:-1] if alone else outcomes:
            assert outcome.ok, (outcome.reason, outcome.events)
            assert not [event for event in outcome.events if "lost" in event], outcome.events
            rounds.setdefault(outcome.round, []).append(outcome)
    assert sorted(rounds) == list(range(ROUNDS))
    for number, outcomes in rounds.items():
        assert {outcome.digest for outcome in outcomes} == {outcomes[0].digest}, number
        assert len(outcomes) == len(outcomes[0].contributors), number
    seconds = sorted(max(outcome.seconds["exchange"] for outcome in outcomes) for outcomes in rounds.values())
    sizes = Counter(len(outcomes) for outcomes in rounds.values())
    print(
        f"exchange: min {seconds[0]:.2f} s, median {seconds[ROUNDS // 2]:.2f}, most {seconds[-1]:.2f}; {sizes}"
    )
