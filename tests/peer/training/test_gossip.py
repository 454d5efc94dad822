"""`Gossip`: exchanges of a loop's parameters beside its steps, with a swarm in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contracts.run import SOON, join_all
from e2e.swarm import eventually
from equipoise.averaging.outcome import Idle, Outcome
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.peer import Client
from equipoise.peer.embedded import Peer
from equipoise.peer.training import Gossip
from fakes.daemon import FakeNetwork


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Client]]:
    """Two peers of one swarm."""
    FakeNetwork().install(monkeypatch)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Peer()) for _ in range(2)]


def test_a_newcomer_takes_its_partners_model_and_keeps_the_steps_of_its_loop(pair: list[Client]) -> None:
    own, partners = torch.nn.Parameter(torch.full((4,), 5.0)), torch.full((4,), -3.0)
    run, partner = join_all(pair, [[own], [partners]], strategy="gossip")
    sgd = torch.optim.SGD([own], lr=1.0)

    def step(by: float) -> None:
        own.grad = torch.full((4,), -by)
        sgd.step()

    def exchange(number: int) -> Outcome:
        def collected() -> bool:
            step(0.0)
            return gossip.exchanged == number

        outcome = partner.average(1.0, SOON)
        eventually(collected, "the step that takes the mean")
        return outcome

    me = pair[0].peer_id
    with Gossip(run, every=1, weight=2.0) as gossip:
        step(0.0)  # The first exchange begins with a copy of this.
        step(0.5)
        assert exchange(1).contributors[me] == ATTENDANCE_LIMIT == 2.0**-30
        torch.testing.assert_close(partners, torch.full((4,), -3.0))
        torch.testing.assert_close(own.data, torch.full((4,), -3.0 + 0.5))
        step(0.25)  # The next exchange has begun with -2.5.
        assert exchange(2).contributors[me] == 2.0
        mean = (2 * -2.5 - 3.0) / 3
        torch.testing.assert_close(partners, torch.full((4,), mean))
        torch.testing.assert_close(own.data, torch.full((4,), mean + 0.25))
        gossip.finish(0.1)


def test_an_end_without_some_of_the_peers_says_how_many_end_with_its_model(pair: list[Client]) -> None:
    run = pair[0].join("digits", [torch.nn.Parameter(torch.zeros(4))], strategy="gossip")
    gossip, outcome = Gossip(run, every=1), Outcome(ok=True, reason="all contributed", group=("a", "b"))
    end: Any = SimpleNamespace(average=lambda weight, timeout: outcome, state=Idle(peers=2))
    gossip._end = end
    assert gossip.finish().reason == "all contributed; 2 of 3 peers end with this model"
    end.state = Idle(peers=1)
    assert gossip.finish() == outcome
