"""Strangers in a federated run: no number of peers with another state replaces the model, nor do the drawn."""

from __future__ import annotations

import pytest

from equipoise.averaging.state import StateId
from fakes.federated import Client, assert_alike, clients, federated

THEIRS = StateId(500, "b" * 64)


class Liar(Client):
    """It takes part in some rounds as all others, then claims a model of its own, of a far later round."""

    honest = 2

    def work(self) -> None:
        self.join()
        while self.trained.epoch < self.honest:
            self.trained.step()
        for one in (*self.trained._agreed.values(), *self.model.values()):
            one.fill_(666.0)
        self.trained.member._start_from(THEIRS)
        end = self.swarm.now + 60.0
        while self.swarm.now < end:
            self.swarm.compute(0.5)
            self.trained.step()


@pytest.mark.parametrize("liars", [1, 4])
def test_liars_that_were_in_rounds_replace_no_model(liars: int) -> None:
    world = federated("federated:deadline=8,grace=1")
    ours = clients(world, 3, rounds=12)
    for index in range(3, 3 + liars):
        Liar(world, index, rounds=12).begin()
    world.run()
    assert_alike(ours)
    for one in ours:
        assert one.history[-1].number == 12
        assert float(one.model["w"].abs().max()) < 100
