"""Strangers that are in a run first, with another target batch, keep nobody out of it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from e2e.learners import daemons
from e2e.swarm import Swarm, eventually
from e2e.test_newcomers import Trainer
from equipoise.peer import connect
from oracles.training import network

UPDATES = 10


class Pair(Trainer):
    beside = 1


@pytest.mark.slow
@pytest.mark.parametrize("strangers", [1, 20])
def test_strangers_with_another_target_batch_keep_nobody_out(swarm: Swarm, strangers: int) -> None:
    places = daemons(swarm, 3 + strangers)
    with contextlib.ExitStack() as stack:
        for place in places[3:]:
            peer, model = stack.enter_context(connect(place.home)), network(seed=0)
            run = stack.enter_context(peer.join("shared", model, codec="fp32", group_size=32))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), target_batch_size=97)
        honest = [Pair(place, index) for index, place in enumerate(places[:3])]
        for trainer in honest[:2]:
            trainer.start()
        eventually(
            lambda: all(one.updates >= UPDATES for one in honest[:2]), "updates of the first two", 120.0
        )
        honest[2].start()  # It was told to join by the first, as the second was.
        eventually(lambda: honest[2].updates >= UPDATES, "updates of the newcomer", 120.0)
        for trainer in honest:
            trainer.ended.set()
        for trainer in honest:
            trainer.join(60.0)
    first, _, newcomer = (one.states for one in honest)
    common = first.keys() & newcomer.keys()
    assert len(common) >= UPDATES / 2
    assert all(first[epoch] == newcomer[epoch] for epoch in common)
