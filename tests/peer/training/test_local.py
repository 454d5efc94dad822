"""`LocalSGD` and `DiLoCo`: local steps, and an exchange now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from equipoise.averaging.outer import Nesterov, parse_outer
from equipoise.averaging.schema import SchemaError
from equipoise.peer import Refused
from equipoise.peer.training import DiLoCo, LocalSGD
from equipoise.peer.training.local import dealt
from fakes.trainers import SAMPLES, adamw
from fakes.world import World
from oracles.training import Nesterov as NesterovReference
from oracles.training import batch_of, difference, loss_of, network, train_diloco

EVERY = 6


class Local:
    """One peer with local steps."""

    def __init__(self, swarm: World, index: int, steps: int, seconds: float = 0.5, **options: Any) -> None:
        self.swarm, self.index, self.count, self.seconds = swarm, index, steps, seconds
        self.method: Callable[..., DiLoCo] = DiLoCo
        self.options = {"every": EVERY, **options}
        self.model: Any = network()
        self.trained: DiLoCo
        self.seen: list[tuple[int, int, str]] = []
        self.until_epoch = 10**9

    def begin(self, at: float = 0.0) -> Local:
        self.swarm.peer(f"peer{self.index}", self.train, at)
        return self

    def join(self) -> None:
        self.run = self.swarm.join(f"peer{self.index}", "text", self.model)
        self.trained = self.method(self.run, **self.options)

    def train(self) -> None:
        self.join()
        optimizer = adamw(self.model.parameters())
        with self.trained:
            for at in range(self.count):
                self.swarm.compute(self.seconds)
                optimizer.zero_grad()
                loss_of(self.model, batch_of(self.index, at, SAMPLES)).backward()
                optimizer.step()
                self.seen.append((self.trained.steps, self.trained.epoch, self.trained.reason))
                if self.trained.epoch >= self.until_epoch:
                    break

    def named(self) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in self.model.named_parameters()}

    def images(self) -> list[bytes]:
        return [bytes(member.image().numpy()) for member in self.trained.members]


def trained(swarm: World, peers: int, steps: int, **options: Any) -> list[Local]:
    found = [Local(swarm, index, steps, **options).begin() for index in range(peers)]
    swarm.run()
    return found


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_peers_end_alike_under_every_codec(codec: str) -> None:
    peers = trained(World(codec), 3, 4 * EVERY)
    assert peers[0].trained.epoch == 4
    assert all(peer.images() == peers[0].images() for peer in peers)
    assert all(difference(peer.named(), peers[0].named()) == 0 for peer in peers)


def test_diloco_ends_with_the_values_of_its_reference(world: World) -> None:
    peers = trained(world, 4, 5 * EVERY)
    model = network()
    workers = [[batch_of(peer, at, SAMPLES) for at in range(5 * EVERY)] for peer in range(4)]
    train_diloco(model, adamw, workers, EVERY, NesterovReference())
    assert difference(peers[0].named(), dict(model.named_parameters())) < 1e-5


def test_local_sgd_is_diloco_that_averages(world: World) -> None:
    peers = [Local(world, index, 3 * EVERY) for index in range(3)]
    for peer in peers:
        peer.method = LocalSGD
        peer.begin()
    world.run()
    model = network()
    workers = [[batch_of(peer, at, SAMPLES) for at in range(3 * EVERY)] for peer in range(3)]
    train_diloco(model, adamw, workers, EVERY, NesterovReference(lr=1.0, momentum=0.0))
    assert difference(peers[0].named(), dict(model.named_parameters())) < 1e-5


def test_fragments_are_exchanged_in_turn(world: World) -> None:
    steps: list[int] = []
    peers = [Local(world, index, 4 * EVERY, fragments=3) for index in range(2)]
    world.run(*peers)
    for peer in peers:
        assert [member.id.epoch for member in peer.trained.members] == [4, 4, 4]
        assert peer.images() == peers[0].images()
        steps = [fragment.schedule.sent_at for fragment in peer.trained._fragments]
        assert [step % EVERY for step in steps] == [2, 4, 0]
    assert difference(peers[0].named(), peers[1].named()) > 0, (
        "what is exchanged last is alike, the rest has moved on"
    )


def test_with_overlap_nobody_waits_for_a_round(world: World) -> None:
    world.net.latency = 0.11
    peers = trained(world, 2, 32, fragments=2, delay=2, merge=0.5, every=10)
    assert all(peer.images() == peers[0].images() for peer in peers)
    # Half a second a step; two meetings at the start, of two fragments, and two questions at the end.
    assert world.now <= 32 * 0.5 + 2 * 0.9 + 2 * world.recover_seconds + 1e-6


def test_merge_keeps_part_of_what_was_done_meanwhile(world: World) -> None:
    world.net.latency = 0.01
    peers = trained(world, 2, EVERY + 2, delay=2, merge=0.25)
    found = [peer.trained._fragments[0] for peer in peers]
    before = [network() for _ in range(2)]
    for index, model in enumerate(before):
        optimizer = adamw(model.parameters())
        for at in range(EVERY + 2):
            optimizer.zero_grad()
            loss_of(model, batch_of(index, at, SAMPLES)).backward()
            optimizer.step()
    for index in range(2):
        expected = {
            name: agreed + 0.25 * (dict(before[index].named_parameters())[name].detach() - agreed)
            for name, agreed in found[index].model.values.items()
        }
        assert difference(peers[index].named(), expected) < 1e-5


def test_a_late_joiner_takes_on_the_agreed_parameters_and_the_moments(world: World) -> None:
    early = [Local(world, index, 200) for index in range(2)]
    late = Local(world, 2, 200)
    late.model = network(seed=3)
    for peer in [*early, late]:
        peer.until_epoch = 12
        peer.begin(at=8.0 if peer is late else 0.0)
    world.run()
    assert all(peer.trained.epoch == 12 for peer in [*early, late])
    assert late.images() == early[0].images()
    assert late.trained.steps == early[0].trained.steps


def test_a_late_joiner_of_fragments(world: World) -> None:
    early = [Local(world, index, 200, fragments=2, delay=1, merge=0.5) for index in range(2)]
    late = Local(world, 2, 200, fragments=2, delay=1, merge=0.5)
    for peer in [*early, late]:
        peer.until_epoch = 14
        peer.begin(at=8.0 if peer is late else 0.0)
    world.run()
    assert late.images()[1] == early[0].images()[1]
    assert late.trained.steps == early[0].trained.steps


def test_who_misses_the_last_exchange_ends_with_it_all_the_same(world: World) -> None:
    world.fails = lambda number, peer: number == 4 and peer == "peer2"
    world.recover_seconds = 4.0  # Longer than a step waits for it.
    peers = trained(world, 3, 3 * EVERY)
    assert {peer for peer, _ in world.recovered} == {"peer2"}
    assert len({peer.trained.member.id for peer in peers}) == 1
    assert len({str(peer.named()) for peer in peers}) == 1
    assert all(peer.trained.finished and peer.trained.finished.in_step for peer in peers)


def test_a_round_that_fails_is_tried_again(world: World) -> None:
    world.fails = lambda number, peer: number == 3
    peers = trained(world, 2, 3 * EVERY + 2)
    assert peers[0].images() == peers[1].images()
    assert peers[0].trained.epoch == 3


def test_one_that_missed_an_exchange_catches_up(world: World) -> None:
    world.fails = lambda number, peer: number == 3 and peer == "peer1"
    peers = [Local(world, index, 100) for index in range(3)]
    for peer in peers:
        peer.until_epoch = 8
        peer.begin()
    world.run()
    assert all(peer.images() == peers[0].images() for peer in peers)


def test_alone_it_makes_outer_steps_by_itself_or_waits(world: World) -> None:
    trains = Local(world, 0, 60).begin()
    world.run()
    assert trains.trained.epoch >= 5
    assert trains.trained.reason == "it trains alone: no other peer of this run is known"
    waits = Local(World(), 0, 60, alone="wait")
    waits.begin()
    waits.swarm.run()
    assert waits.trained.epoch == 0
    assert waits.trained.reason.startswith("it waits")


def test_one_whose_local_steps_diverge_gives_them_up(world: World) -> None:
    peers = [Local(world, index, 3 * EVERY) for index in range(3)]
    for peer in peers:
        peer.begin()

    def break_it() -> None:
        world.compute(0.5 * EVERY + 0.3)
        with torch.no_grad():
            peers[1].model[0].weight.fill_(torch.nan)

    world.peer("sun", break_it)
    world.run()
    assert all(peer.images() == peers[0].images() for peer in peers)
    assert all(torch.isfinite(value).all() for value in peers[1].named().values())
    assert peers[0].trained.epoch == 3


def test_hooks_are_gone_after_the_context(world: World) -> None:
    peer = Local(world, 0, 2)
    peer.begin()
    world.run()
    optimizer = adamw(peer.model.parameters())
    loss_of(peer.model, batch_of(0, 0, SAMPLES)).backward()
    optimizer.step()
    assert peer.trained.steps == 2


def test_other_optimizers_do_not_count(world: World) -> None:
    peer = Local(world, 0, 1)
    peer.join()
    other = network()
    first, second = adamw(peer.model[0].parameters()), adamw(peer.model[2].parameters())
    with peer.trained:
        for model, optimizer in (
            (other, adamw(other.parameters())),
            (peer.model, first),
            (peer.model, second),
        ):
            loss_of(model, batch_of(0, 0, SAMPLES)).backward()
            optimizer.step()
    assert peer.trained.steps == 1


def test_a_layer_that_is_trained_later_is_refused_with_fragments_too(world: World) -> None:
    peer = Local(world, 0, EVERY, fragments=2)
    peer.model[0].requires_grad_(False)
    peer.join()
    peer.model[0].requires_grad_(True)
    peer.trained.steps = EVERY - 1
    with pytest.raises(SchemaError, match="have changed since join; join again"):
        peer.trained._stepped(adamw(peer.model.parameters()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every: expected a whole number of steps >= 1, got 0"),
        ({"fragments": 7}, "fragments: expected 1 to 6, and no more than `every`, got 7"),
        ({"fragments": 2, "delay": 3}, "delay: expected 0 to 2 steps: below every / fragments, got 3"),
        ({"merge": 1.0}, "merge: expected a number from 0 to below 1, got 1.0"),
        ({"weight": 0}, "weight: expected a finite number above 0, got 0"),
        ({"alone": "no"}, "alone: expected 'train' or 'wait', got 'no'"),
    ],
)
def test_options_out_of_range_are_refused(world: World, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Local(world, 0, 1, **options).join()


def test_one_run_trains_one_thing(world: World) -> None:
    peer = Local(world, 0, 1)
    peer.join()
    with pytest.raises(Refused, match="run 'text' is stepped by DiLoCo already"):
        LocalSGD(peer.run, every=3)
    with pytest.raises(Refused, match="run 'text' is stepped by DiLoCo already"):
        peer.run.optimizer(adamw(peer.model.parameters()), target_batch_size=1)


def test_terms_say_how(world: World) -> None:
    peer = Local(world, 0, 1, outer=Nesterov(lr=0.5))
    peer.join()
    assert dict(peer.run.terms) == {
        "training": "DiLoCo",
        "outer step": "nesterov:lr=0.5,momentum=0.9",
        "steps between exchanges": "6",
        "fragments": "1",
        "delay": "0",
        "merge": "0",
        "buffers": "each peer's own",
    }
    frozen = Local(World(), 0, 1)
    frozen.model[0].requires_grad_(False)
    frozen.join()
    agreed = frozen.run.core.agreed
    assert agreed is not None
    assert [line.split()[0] for line in agreed.frozen] == ["'0.weight'", "'0.bias'"]


@pytest.mark.parametrize("outer", ["fedadam:eta=0.01", "fedyogi", "fedadagrad", "fedavgm:momentum=0.5"])
def test_an_outer_step_by_its_spec_with_a_late_joiner(world: World, outer: str) -> None:
    early = [Local(world, index, 200, outer=outer) for index in range(2)]
    late = Local(world, 2, 200, outer=outer)
    late.model = network(seed=3)
    for peer in [*early, late]:
        peer.until_epoch = 9
        peer.begin(at=8.0 if peer is late else 0.0)
    world.run()
    assert dict(late.run.terms)["outer step"] == str(parse_outer(outer))
    assert late.images() == early[0].images()
    assert late.trained._fragments[0].model.outer.tree().keys() == parse_outer(outer).state_dict().keys()


def test_a_wrong_spec_of_an_outer_step_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"unknown outer step 'nestorov'; .*did you mean 'nesterov'"):
        Local(world, 0, 1, outer="nestorov").join()


def test_fragments_are_of_about_the_same_size() -> None:
    named = dict(network().named_parameters())
    sizes = [sum(one.numel() for one in fragment.values()) for fragment in dealt(named, 2)]
    assert sum(sizes) == sum(one.numel() for one in named.values())
    assert max(sizes) <= max(one.numel() for one in named.values()) + sum(sizes) / 2
    with pytest.raises(ValueError, match="at most as many as there are parameters, 6, got 7"):
        dealt(named, 7)
