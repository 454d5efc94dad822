"""Local steps whose rounds do not wait for the slowest: it counts late, at a discount, and stays in step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from equipoise.averaging.outer import Nesterov
from equipoise.peer import Refused
from equipoise.peer.control.messages import StartRound
from equipoise.peer.training import DiLoCo
from fakes.trainers import SAMPLES, adamw
from fakes.world import World
from oracles.training import batch_of, loss_of, network

EVERY, STEP_SECONDS, SLOWER = 6, 1.0, 20
SLOW, DIES = "peer5", "peer4"


class Loops:
    """DiLoCo of six peers: the last is slow, the one before it may die half-way."""

    def __init__(self, strategy: str, exchanges: int, every: int = EVERY, **options: Any) -> None:
        self.world = World(strategy=strategy)
        self.exchanges, self.every, self.options = exchanges, every, options
        self.models = {f"peer{index}": network() for index in range(6)}
        self.loops: dict[str, DiLoCo] = {}
        self.waited: dict[str, float] = {}
        self.ended = False

    def train(self, peer: str, index: int) -> None:
        world, model = self.world, self.models[peer]
        run = world.join(peer, "text", model)
        seconds = STEP_SECONDS * EVERY / self.every * (SLOWER if peer == SLOW else 1)
        outer = Nesterov(lr=0.7, momentum=0.5)
        loop = self.loops[peer] = DiLoCo(
            run, self.every, outer, wait_for=0 if peer == SLOW else 4, **self.options
        )
        optimizer, began, steps = adamw(model.parameters()), world.now, 0
        with loop:
            while loop.epoch < self.exchanges and not self.ended:
                world.compute(seconds)
                optimizer.zero_grad()
                loss_of(model, batch_of(index, steps, SAMPLES)).backward()
                optimizer.step()
                steps += 1
                self.waited[peer] = 1 - steps * seconds / (world.now - began)
            self.ended = True  # The slow one ends with the others.

    def run(self, slow: bool = True, dies: bool = True) -> Loops:
        for index, peer in enumerate(self.models):
            if slow or peer != SLOW:
                self.world.peer(peer, lambda peer=peer, index=index: self.train(peer, index))  # type: ignore[misc]

        def end() -> None:
            self.world.compute(self.exchanges * EVERY * STEP_SECONDS / 2)
            self.world.kill(DIES)

        if dies:
            self.world.peer("sun", end)
        self.world.run()
        return self

    def rounds(self, peer: str) -> list[Any]:
        asked = [(name, request, got) for _, name, request, got in self.world.log]
        return [got for name, request, got in asked if name == peer and isinstance(request, StartRound)]

    def loss(self) -> float:
        model = self.models["peer0"]
        return sum(float(loss_of(model, batch_of(99, at, 64)).detach()) for at in range(8)) / 8


def assert_goes_on_without_the_slowest(loops: Loops) -> None:
    fast = [peer for peer in loops.loops if peer not in (SLOW, DIES)]
    assert all(loops.waited[peer] <= 0.05 for peer in fast), loops.waited
    assert len({bytes(loops.loops[peer].member.image().numpy()) for peer in fast}) == 1
    late = [one for one in loops.rounds(SLOW) if one.late]
    counted = [one for one in loops.rounds("peer0") if one.contributors.get(SLOW, 0) > 1e-3]
    assert late, "it was late"
    assert counted, "and counted all the same"
    weights = [one.contributors[SLOW] for one in counted]
    assert max(weights) <= loops.every / math.sqrt(1 + 3), "at a discount, by its age"


def test_five_peers_go_on_without_one_that_is_twenty_times_slower_and_one_that_dies() -> None:
    loops = Loops("allreduce:quorum=3,grace=auto,late=next", 30).run()
    assert_goes_on_without_the_slowest(loops)
    assert loops.loops[SLOW].member.image().equal(loops.loops["peer0"].member.image()), "it ends in step"
    own, others = (loops.world.daemons[peer].service.ledgers["text"].of(SLOW) for peer in (SLOW, "peer0"))
    assert 1 <= own.counted <= 0.1 * own.rounds, "status says so"
    assert own.missed["late"] >= 1
    assert others.counted == own.counted


@pytest.mark.slow
@pytest.mark.parametrize("grace", ["10", "auto"])
def test_the_loss_beside_that_of_equal_work_without_the_slow_one(grace: str) -> None:
    strategy = f"allreduce:quorum=3,grace={grace},late=next"
    loops = Loops(strategy, 60, every=30).run()
    assert_goes_on_without_the_slowest(loops)
    alone = Loops(strategy, 60, every=30).run(slow=False)
    print(
        f"grace={grace}: loss {loops.loss():.4f}, without the slow one {alone.loss():.4f}, waited {loops.waited}"
    )
    assert loops.loss() < 1.05 * alone.loss()


def test_late_gradients_of_an_optimizer_are_refused() -> None:
    world, model = World(strategy="allreduce:late=next"), network()
    run = world.join("peer0", "text", model)
    with pytest.raises(Refused, match=r"expected a strategy that drops late gradients.*local steps"):
        run.optimizer(adamw(model.parameters()), target_batch_size=1)
