"""`Gossip`: exchanges of a loop's parameters beside its steps, by real daemons in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.averaging.outcome import Idle, Outcome
from equipoise.averaging.timing import INITIAL_WAIT
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.peer.training import Gossip
from fakes.world import World


def test_a_newcomer_takes_its_partners_model_and_keeps_the_steps_of_its_loop(world: World) -> None:
    own, partners = torch.nn.Parameter(torch.full((4,), 5.0)), torch.full((4,), -3.0)
    given: list[float] = []

    def exchange() -> None:
        run = world.join("partner", "digits", [partners], strategy="gossip")
        for _ in range(2):
            world.compute(5.0)
            given.append(run.average().contributors["newcomer"])

    def train() -> None:
        sgd = torch.optim.SGD([own], lr=1.0)

        def step(by: float) -> None:
            own.grad = torch.full((4,), -by)
            sgd.step()

        def collect(number: int) -> None:
            while gossip.exchanged < number:
                world.compute(0.5)
                step(0.0)

        run = world.join("newcomer", "digits", [own], strategy="gossip")
        with Gossip(run, every=1, weight=2.0) as gossip:
            step(0.0)  # The first exchange begins with a copy of this.
            step(0.5)
            collect(1)
            torch.testing.assert_close(partners, torch.full((4,), -3.0))
            torch.testing.assert_close(own.data, torch.full((4,), -3.0 + 0.5))
            step(0.25)  # The next exchange has begun with -2.5.
            collect(2)
            mean = (-2.5 - 3.0) / 2  # Both weights count as the smaller one.
            torch.testing.assert_close(partners, torch.full((4,), mean))
            torch.testing.assert_close(own.data, torch.full((4,), mean + 0.25))
            gossip.finish(0.1)

    world.peer("partner", exchange)
    world.peer("newcomer", train)
    world.run()
    assert given == [ATTENDANCE_LIMIT, 1.0] == [2.0**-30, 1.0]


def test_an_end_without_some_of_the_peers_says_how_many_end_with_its_model(world: World) -> None:
    run = world.join("peer", "digits", [torch.nn.Parameter(torch.zeros(4))], strategy="gossip")
    gossip, outcome = Gossip(run, every=1), Outcome(ok=True, reason="all contributed", group=("a", "b"))
    end: Any = SimpleNamespace(average=lambda weight, timeout: outcome, state=Idle(peers=2))
    gossip._end = end
    assert gossip.finish().reason == "all contributed; 2 of 3 peers end with this model"
    end.state = Idle(peers=1)
    assert gossip.finish() == outcome


def test_a_straggler_ends_with_the_others(world: World) -> None:
    """The straggler's last steps take longer than a group's first wait."""

    def train(index: int) -> Outcome | None:
        run = world.join(f"peer{index}", "digits", [torch.nn.Parameter(torch.zeros(4))], strategy="gossip")
        with Gossip(run, every=5, wait_for=3) as gossip:
            world.compute((INITIAL_WAIT + 1.5) * (index == 0))
        return gossip.finished

    assert [end and len(end.contributors) for end in world.each(4, train)] == [4] * 4


def test_a_search_that_is_stopped_as_soon_as_it_is_asked_for_ends(world: World) -> None:
    run = world.join("peer", "digits", [torch.ones(4)], strategy="gossip")
    for _ in range(20):
        pending = run.shift(1.0, timeout=60.0)
        pending.stop_search("it ends")
        assert pending.result().reason == "it ends"
    assert world.now < 20.0, "no search waits for its timeout"


def test_a_pair_makes_the_steps_of_noloco_and_keeps_those_of_its_loops(world: World) -> None:
    """Two exchanges beside the formula, by scalars; the loops move by 1 and 3 before each, and by .5 during each."""
    moves = {"a": 1.0, "b": 3.0}
    ended: dict[str, list[float]] = {"a": [], "b": []}

    def train(name: str) -> None:
        own = torch.nn.Parameter(torch.zeros(4))
        sgd = torch.optim.SGD([own], lr=1.0)

        def step(by: float) -> None:
            own.grad = torch.full((4,), -by)
            sgd.step()

        run = world.join(name, "digits", [own], strategy="gossip")
        with Gossip(run, every=2, outer="nesterov:lr=0.7,momentum=0.3", wait_for=1) as gossip:
            for number in (1, 2):
                step(moves[name] - 0.25)
                step(0.25)  # The exchange begins.
                step(0.5)
                pending = gossip._pending
                assert pending is not None, "an exchange has begun"
                while not pending.done():
                    world.compute(0.5)
                gossip._collect()
                assert gossip.exchanged == number, gossip.last
                ended[name].append(own[0].item())
                gossip.steps = 0
            gossip.finish(0.1)

    for name in moves:
        world.peer(name, lambda name=name: train(name))
    world.run()
    theta, phi, momentum = dict.fromkeys(moves, 0.0), dict.fromkeys(moves, 0.0), dict.fromkeys(moves, 0.0)
    for exchange in range(2):
        at = {name: theta[name] + moves[name] for name in moves}
        moved = sum(at[name] - phi[name] for name in moves) / 2
        slow = sum(phi.values()) / 2
        for name in moves:
            momentum[name] = 0.3 * momentum[name] + 0.7 * moved + 0.7 * (slow - phi[name])
            phi[name] += momentum[name]
            theta[name] = phi[name] + 0.5
            assert ended[name][exchange] == pytest.approx(theta[name], abs=0.02), (name, exchange)


def test_an_outer_step_of_gossip_is_one_of_nesterov(world: World) -> None:
    run = world.join("peer", "digits", [torch.nn.Parameter(torch.zeros(4))], strategy="gossip")
    with pytest.raises(
        ValueError, match=r"expected nesterov, as in \"nesterov:lr=0\.7,momentum=0\.3\", got 'average'"
    ):
        Gossip(run, every=1, outer="average")
