"""Peers that come late, miss rounds, train alone, die: all find the group's state again by themselves."""

from __future__ import annotations

import contextlib
import random
from collections import Counter as Counts
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.averaging.outcome import NoPeers, Outcome
from equipoise.averaging.replication import follower, lineage, server
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.replication.lineage import CHECK_EVERY
from equipoise.averaging.state import StateId
from equipoise.peer.client.run import RunCore
from equipoise.peer.training.member import (
    CATCH_UP_SECONDS,
    FINISH_SECONDS,
    NOTICE_SECONDS,
    POLL_SECONDS,
    WAIT_SECONDS,
    Finished,
    wait_for,
)
from fakes.trainers import SAMPLES, Trainer, adamw, assert_alike, given
from fakes.world import World
from oracles.training import network


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)


class Counter:
    """The user's own state: it must be alike on all peers."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"words": torch.zeros(3, dtype=torch.int64), "note": "start"}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict


def test_a_late_joiner_takes_the_groups_state_while_the_others_go_on(world: World) -> None:
    options = {"scheduler": schedule, "target_batch_size": 3 * SAMPLES}
    early = [Trainer(world, index, 40, **options).begin() for index in range(3)]
    late = Trainer(world, 3, 40, **options)
    late.model = network(seed=7)
    late.begin(at=5.0)
    world.run()
    assert_alike([*early, late])
    first = next(
        at for at, (_, reason) in enumerate(late.seen) if "caught up" in reason or "is the" in reason
    )
    assert first <= 2, late.seen[: first + 1]
    epochs = [epoch for epoch, _ in late.seen[first:]]
    assert epochs[0] > 5
    # Nobody stepped less often for it: an epoch of half a second and a round.
    assert world.now < 40 * 0.62 + 1
    assert "peer3" in early[0].last.contributors
    assert early[0].last.contributors["peer3"] == SAMPLES
    assert given(world, "peer3") == SAMPLES * len(set(epochs)), "gradients of an older state count nowhere"


def test_users_state_comes_along(world: World) -> None:
    counters = [Counter() for _ in range(3)]
    counters[0].seen["words"] = counters[1].seen["words"] = torch.tensor([1, 2, 3])
    trainers = [Trainer(world, at, 30, extra={"words": counters[at]}) for at in range(3)]
    for at, trainer in enumerate(trainers):
        trainer.begin(at=0.0 if at < 2 else 20.0)
    world.run()
    assert_alike(trainers)
    assert counters[2].seen["words"].tolist() == [1, 2, 3]


def test_statistics_come_along_where_they_are_averaged(world: World) -> None:
    trainers = [Trainer(world, at, 12, buffers=True) for at in range(3)]
    for at, trainer in enumerate(trainers):
        trainer.model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), network())
        trainer.begin(at=0.0 if at < 2 else 3.0)
    world.run()
    assert_alike(trainers)
    late, early = trainers[2].model[0], trainers[0].model[0]
    assert torch.equal(late.running_var, early.running_var)
    assert int(early.num_batches_tracked) == trainers[0].calls
    assert trainers[2].calls + 3 <= int(late.num_batches_tracked) <= trainers[0].calls


class Codebook(torch.nn.BatchNorm1d):
    """Statistics over all batches, and what only the first batch of a training makes."""

    initted: torch.Tensor

    def __init__(self) -> None:
        super().__init__(64, momentum=None, affine=False)
        self.register_buffer("initted", torch.tensor([False]))
        self.register_buffer("seed", torch.tensor(2**40 + 1))
        self.register_buffer("positions", torch.arange(2000))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.initted.fill_(True)
        return super().forward(batch)


class Counting(Trainer):
    """Features of mean 5 and variance 4; notes the error of the statistics' mean after each epoch."""

    def join(self) -> None:
        self.model = torch.nn.Sequential(Codebook(), torch.nn.Linear(64, 1))
        self.errors: list[float] = []
        super().join()

    def backward(self) -> None:
        chance = torch.Generator().manual_seed(1000 * self.index + self.calls)
        self.model(torch.randn(16, 64, generator=chance) * 2 + 5).square().mean().backward()
        self.errors += [float((self.model[0].running_mean - 5).square().mean().sqrt())] * (
            self.opt.epoch + 1 - len(self.errors)
        )


@pytest.mark.parametrize(("others", "begins"), [(2, 3.0), (2, 20.0), (1, 20.0)])
def test_a_newcomers_counter_is_the_groups(world: World, others: int, begins: float) -> None:
    """With a counter of 0, its first batches would replace the statistics that it has downloaded."""
    trainers = [
        Counting(world, at, 50, buffers=True, target_batch_size=2 * SAMPLES) for at in range(others + 1)
    ]
    for trainer in trainers[:-1]:
        trainer.begin()
    late, early = trainers[-1].begin(at=begins), trainers[0]
    world.run()
    assert_alike(trainers)
    ours, theirs = late.model[0], early.model[0]
    assert late.calls + 4 <= int(ours.num_batches_tracked)
    assert abs(int(ours.num_batches_tracked) - int(theirs.num_batches_tracked)) <= 3
    assert abs(int(theirs.num_batches_tracked) - early.calls) <= 3
    assert bool(ours.initted)
    assert int(ours.seed) == 2**40 + 1
    first = next(epoch for epoch, reason in late.seen if "caught up" in reason or "is the" in reason)
    assert max(early.errors[first + 1 :]) <= 1.1 * early.errors[first]


@pytest.mark.parametrize("heard", [0, 7, 8, 9])
def test_a_peer_whose_round_failed_gets_its_mean_and_no_snapshot(world: World, heard: int) -> None:
    """It hears no frame of the round, or too few: its contribution, which counts without it or not, counts once."""
    world.hear_of_round("peer2", 4, heard)
    trainers = [Trainer(world, index, 15).begin() for index in range(4)]
    world.run()
    assert_alike(trainers)
    (missed,) = world.recovered
    assert missed[0] == "peer2"
    assert not world.offered
    assert given(world, "peer2") == 15 * SAMPLES


def test_peers_that_began_otherwise_take_on_what_most_have(world: World) -> None:
    trainers = [Trainer(world, index, 10) for index in range(3)]
    trainers[1].model = network(seed=5)
    for trainer in trainers:
        trainer.begin()
    world.run()
    assert_alike(trainers)


def test_alone_it_trains_on_and_says_so(world: World) -> None:
    trainer = Trainer(world, 0, 5, target_batch_size=SAMPLES).begin()
    world.run()
    assert trainer.opt.reason == "it trains alone: no other peer of this run is known"
    assert not trainer.last.ok
    assert trainer.last.reason == trainer.opt.reason
    assert world.now >= 10.0, "it looked for company first"
    assert any("looks for one for 10 s" in reason for _, reason in trainer.seen)


def test_alone_it_does_what_the_optimizer_alone_would(world: World) -> None:
    trainer = Trainer(world, 0, 5, target_batch_size=SAMPLES, patience=0).begin()
    world.run()
    plain = Trainer(world, 0, 5)
    optimizer = adamw(plain.model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        plain.backward()
        plain.calls += 1
        optimizer.step()
    for name, value in plain.named().items():
        assert torch.equal(trainer.named()[name], value)


def test_alone_it_waits_if_told_to(world: World) -> None:
    waiting = Trainer(world, 0, 5, alone="wait").begin()
    other = Trainer(world, 1, 5, alone="wait").begin(at=30.0)
    world.run()
    assert_alike([waiting, other])
    assert any(reason == "it waits: no other peer of this run is known" for _, reason in waiting.seen)
    assert {epoch for epoch, _ in waiting.seen[:40]} == {0}


def test_peers_that_join_a_peer_that_trained_alone_take_its_state(world: World) -> None:
    first = Trainer(world, 0, 60, patience=1.0, target_batch_size=2 * SAMPLES).begin()
    second = Trainer(world, 1, 60, patience=1.0, target_batch_size=2 * SAMPLES).begin(at=10.0)
    world.run()
    assert_alike([first, second])
    assert first.last.contributors == {"peer0": SAMPLES, "peer1": SAMPLES}


def test_a_peer_trains_on_alone_after_the_others_have_gone(world: World) -> None:
    stays = Trainer(world, 0, 20, patience=2.0).begin()
    goes = Trainer(world, 1, 5, patience=2.0).begin()
    world.run()
    assert goes.opt.epoch == 5
    assert stays.opt.epoch == 20
    assert "trains alone" in stays.opt.reason


def test_two_that_went_their_own_ways_find_together_again(world: World) -> None:
    """A network that is cut: rounds fail for one side, which goes on alone."""
    world.fails = lambda number, peer: 3 <= number <= 6 and peer == "peer0"
    trainers = [Trainer(world, index, 30).begin() for index in range(3)]
    world.run()
    assert_alike(trainers)


def test_drift_is_found_by_the_parameters_own_digest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "CHECK_EVERY", 8)

    class Drifting(Trainer):
        def backward(self) -> None:
            super().backward()
            if self.index == 1 and self.opt.epoch == 3:
                with torch.no_grad():
                    next(self.model.parameters()).view(-1)[0].add_(1e-3)

    trainers = [Drifting(world, index, 20).begin() for index in range(3)]
    world.run()
    assert_alike(trainers)
    assert world.offered


def test_a_download_across_a_look_at_the_parameters(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "CHECK_EVERY", 4)
    world.fetch_seconds = 4.0
    early = [Trainer(world, index, 40).begin() for index in range(3)]
    late = Trainer(world, 3, 40).begin(at=5.0)
    world.run()
    assert_alike([*early, late])
    assert CHECK_EVERY == 64


def test_a_download_that_takes_longer_than_means_are_kept_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "MAX_MISSED", 4)
    monkeypatch.setattr(server, "OWN_MEANS", 4)
    world.fetch_seconds = 6.0
    early = [Trainer(world, index, 60).begin() for index in range(3)]
    late = Trainer(world, 3, 60).begin(at=5.0)
    original = world.compute

    def quicker(seconds: float) -> None:
        if world.now > 20:
            world.fetch_seconds = 1.0
        original(seconds)

    world.compute = quicker  # type: ignore[method-assign]
    world.run()
    assert_alike([*early, late])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_peers_that_come_fail_and_die_at_random_end_alike(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance.choice(["fp32", "int8"]))
    world.fetch_seconds = chance.uniform(0.1, 4.0)
    world.net.latency = chance.uniform(0.005, 0.05)
    failing = {(chance.randrange(2, 30), f"peer{chance.randrange(5)}") for _ in range(6)}
    world.fails = lambda number, peer: (number, peer) in failing
    options = {"delay": chance.random() < 0.5, "target_batch_size": chance.choice([8, 24, 40])}
    trainers = []
    for index in range(5):
        trainer = Trainer(world, index, 50, seconds=chance.uniform(0.3, 0.9), **options)
        if chance.random() < 0.5:
            trainer.model = network(seed=index)
        trainers.append(trainer.begin(at=chance.choice([0.0, 0.0, chance.uniform(0, 15)])))

    def reap() -> None:
        world.compute(chance.uniform(3, 20))
        world.kill("peer4")

    world.peer("reaper", reap)
    world.run()
    ended = [trainer for trainer in trainers[:4] if trainer.opt.epoch == 50]
    # The last to come to the end may find that the others have left, and have to make the last steps alone.
    ids = Counts(trainer.opt.id for trainer in ended)
    most, heads = ids.most_common(1)[0]
    assert heads >= 2, [(trainer.opt.epoch, trainer.opt.reason) for trainer in trainers]
    assert_alike(trainer for trainer in ended if trainer.opt.id == most)


def test_one_whose_update_is_interrupted_and_goes_on_resynchronises(world: World) -> None:
    trainers = [Trainer(world, index, 40) for index in range(3)]
    interrupted: list[int] = []

    class Once(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if trainers[0].opt.epoch == 5 and not interrupted:
                interrupted.append(5)
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1.0)
                raise MemoryError
            return super().step()

    Once.__name__ = "AdamW"  # Only peers with optimizers of one name meet.

    class Stubborn(Trainer):
        def join(self) -> None:
            if not self.calls:
                super().join()

        def train(self) -> None:
            with contextlib.suppress(MemoryError):
                super().train()
            super().train()

    trainers[0] = Stubborn(world, 0, 40)
    trainers[0].make = lambda parameters: Once(parameters, lr=1e-2)
    for trainer in trainers:
        trainer.begin()
    world.run()
    assert interrupted
    assert_alike(trainers)


def test_a_loop_whose_group_is_slow_has_its_turn_all_the_same(world: World) -> None:
    """Rounds come every forty seconds: one that looks for the group's state waits for none of them to its end."""
    early = [
        Trainer(world, index, 6, seconds=40.0, target_batch_size=2 * SAMPLES).begin() for index in (0, 1)
    ]
    late = Trainer(world, 2, 6, seconds=1.0, target_batch_size=2 * SAMPLES)
    turns: list[float] = []

    def timed() -> None:
        late.join()
        while late.opt.epoch < 6 and world.now < 300.0:
            world.compute(late.seconds)
            late.opt.zero_grad()
            late.backward()
            late.calls += 1
            before, was_in_step = world.now, late.opt.in_step
            late.opt.step()
            if not was_in_step and not late.opt.in_step:
                turns.append(world.now - before)

    world.peer("peer2", timed, at=85.0)
    world.run()
    assert early[0].opt.epoch == 6
    assert len(turns) >= 3
    assert max(turns) <= CATCH_UP_SECONDS + POLL_SECONDS


def test_one_whose_rounds_all_fail_goes_on_alone_though_others_are_known(world: World) -> None:
    world.fails = lambda number, peer: peer == "peer2"
    trainers = [Trainer(world, index, 8, target_batch_size=SAMPLES).begin() for index in range(3)]
    world.run()
    assert trainers[2].opt.epoch == 8
    assert any("rounds in a row failed" in reason for _, reason in trainers[2].seen)


def test_an_image_that_says_another_id_than_its_donors_is_not_loaded(world: World) -> None:
    early = [Trainer(world, index, 30).begin() for index in range(3)]
    late = Trainer(world, 3, 30)
    late.model = network(seed=7)
    late.begin(at=5.0)

    class Lying(RunCore):
        def offer(self, state: StateId, image: bytes | memoryview) -> None:
            super().offer(StateId(state.epoch + 1, state.lineage), image)

    def lie() -> None:
        world.compute(3.0)
        for trainer in early:
            trainer.run.core.__class__ = Lying

    world.peer("liar", lie)
    world.run()
    assert_alike(early)
    assert max(epoch for epoch, _ in late.seen[:10]) == 0
    assert any("the image says" in reason for _, reason in late.seen)


def test_statistics_that_are_not_finite_are_healed_by_the_groups(world: World) -> None:
    class Spoilt(Trainer):
        def backward(self) -> None:
            super().backward()
            if self.index == 0 and self.opt.epoch == 4:
                self.model[0].running_mean.fill_(torch.nan)

    trainers = [Spoilt(world, at, 12, buffers=True) for at in range(3)]
    for trainer in trainers:
        trainer.model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), network())
        trainer.begin()
    world.run()
    assert_alike(trainers)
    assert bool(torch.isfinite(trainers[0].model[0].running_mean).all())
    assert {epoch for epoch, _ in trainers[0].seen} >= {4, 5}


def test_one_that_has_caught_up_contributes_to_the_round_after_the_next_at_the_latest(
    world: World,
) -> None:
    class Noting(Trainer):
        rounds: dict[int, float]
        """Of those that ended while it was in step: what it gave."""

        def backward(self) -> None:
            super().backward()
            last = self.opt.last
            if last is not None and last.ok and self.opt.in_step:
                self.rounds[last.round] = last.contributors.get(self.name, 0.0)

    options = {"target_batch_size": 3 * 12 * SAMPLES}
    early = [Trainer(world, index, 12, **options).begin() for index in range(3)]
    late = Noting(world, 3, 12, **options)
    late.rounds = {}
    late.begin(at=20.3)
    world.run()
    assert_alike([*early, late])
    given = [late.rounds[number] for number in sorted(late.rounds)]
    assert len(given) >= 5
    assert min(given[2:]) >= SAMPLES, late.rounds


@pytest.mark.parametrize("at", [0.0, 0.1, 5.0])
def test_two_peers_find_together_without_a_round_that_fails(world: World, at: float) -> None:
    options = {"patience": 1.0, "target_batch_size": 2 * SAMPLES}
    first, second = Trainer(world, 0, 20, **options), Trainer(world, 1, 20, **options)
    second.model = network(seed=7)
    first.begin()
    second.begin(at=at)
    world.run()
    assert_alike([first, second])
    assert not [reason for trainer in (first, second) for _, reason in trainer.seen if "failed" in reason]


# ---- ending together ----


class Finisher(Trainer):
    """One that ends in an orderly way."""

    end: Finished

    def begin(self, at: float = 0.0) -> Finisher:
        super().begin(at)
        return self

    def train(self) -> None:
        super().train()
        self.end = self.opt.finish()


def test_a_peer_that_misses_the_last_mean_ends_with_it_all_the_same(world: World) -> None:
    world.fails = lambda number, peer: number == 6 and peer == "peer2"
    world.recover_seconds = 2.0
    trainers = [Finisher(world, index, 5).begin() for index in range(4)]
    world.run()
    assert_alike(trainers)
    assert [peer for peer, _ in world.recovered] == ["peer2"]
    assert all(trainer.end.in_step for trainer in trainers)


def test_a_peer_that_waits_for_others_that_have_ended_finds_out_that_they_are_further(world: World) -> None:
    world.fails = lambda number, peer: number == 7 and peer == "peer2"
    trainers = [Finisher(world, index, 6) for index in range(4)]
    nobody = StateId(0, "f" * 64)
    asked: list[StateId | None] = []

    class Deaf(RunCore):
        """The first time it asks, nobody answers."""

        def fetch(self, wish: Wish, timeout: float = 60.0) -> Any:
            asked.append(wish.after)
            return super().fetch(wish if len(asked) > 1 else Wish(after=nobody), timeout)

    def deafen() -> None:
        world.compute(0.1)
        trainers[2].run.core.__class__ = Deaf

    for trainer in trainers:
        trainer.begin()
    world.peer("deafen", deafen)
    world.run()
    assert_alike(trainers)
    assert all(trainer.end.in_step for trainer in trainers)
    assert asked[0] == asked[1]
    assert world.now < 6 * 0.62 + 1 + 5, "it did not wait for its round to time out"


def test_a_straggler_that_finds_nobody_left_gets_what_they_have_left_behind(world: World) -> None:
    trainers = [Finisher(world, index, 8, target_batch_size=3 * SAMPLES) for index in range(4)]
    late = trainers[3]
    backward = late.backward

    def held_up() -> None:
        if late.opt.epoch == 5:
            world.compute(30.0)  # The others stay for ten seconds at most.
        backward()

    late.backward = held_up  # type: ignore[method-assign]
    for trainer in trainers:
        trainer.begin()
    world.run()
    assert_alike(trainers)
    assert late.opt.epoch == 8
    assert not any("alone" in reason for _, reason in late.seen)
    assert world.now < 30.0 + 20.0, "it waited for a group of nobody"


def test_a_download_that_brings_the_last_epoch_ends_the_round_that_was_attended_meanwhile(
    world: World,
) -> None:
    world.recover_seconds = 0.5
    trainers = [Finisher(world, index, 6, target_batch_size=3 * SAMPLES) for index in range(4)]
    late = trainers[3]
    backward = late.backward

    def held_up() -> None:
        if late.opt.epoch == 4 and world.now < 5.5:  # The others have made their last epoch, and still ask.
            world.compute(5.5 - world.now)
        backward()

    late.backward = held_up  # type: ignore[method-assign]
    for trainer in trainers:
        trainer.begin()
    world.run()
    assert_alike(trainers)
    assert late.opt.epoch == 6
    ends = [got for _, peer, _, got in world.log if peer == late.name and isinstance(got, Outcome)]
    assert any(outcome.late for outcome in ends)
    assert world.now < 30.0, "it waited for a round that nobody else was in"


def test_no_peer_waits_for_peers_that_have_left(world: World) -> None:
    goes = Trainer(world, 1, 5, patience=1e9, timeout=1000.0).begin()
    stays = Trainer(world, 0, 20, patience=1e9, timeout=1000.0, alone="wait")
    calls: list[float] = []

    def train() -> None:
        stays.join()
        while world.now < 60.0:
            world.compute(0.5)
            stays.opt.zero_grad()
            stays.backward()
            began = world.now
            stays.opt.step()
            calls.append(world.now - began)

    world.peer(stays.name, train)
    world.run()
    assert goes.opt.epoch == stays.opt.epoch == 5
    assert max(calls) < 5.0, "a step waited for a group of nobody"
    assert "no other peer" in stays.opt.reason


def test_the_end_waits_for_no_round_of_nobody(world: World) -> None:
    goes, stays = (Trainer(world, at, 5, delay=True, target_batch_size=2 * SAMPLES) for at in range(2))
    waited: list[float] = []

    def train_and_go() -> None:
        goes.train()
        world.compute(2.0)

    def train() -> None:
        stays.train()
        stays.backward()
        stays.opt.step()
        assert stays.opt.member.pending
        world.compute(4.0)
        began = world.now
        stays.opt.finish()
        waited.append(world.now - began)

    world.peer(goes.name, train_and_go)
    world.peer(stays.name, train)
    world.run()
    assert waited[0] < FINISH_SECONDS / 2


def test_where_all_are_as_far_nobody_stays(world: World) -> None:
    trainers = [Finisher(world, index, 5).begin() for index in range(4)]
    world.run()
    assert all(trainer.end.in_step for trainer in trainers)
    assert world.now < 5 * 0.62 + 1


def test_one_that_never_came_into_step_says_so_at_the_end(world: World) -> None:
    trainer = Finisher(world, 0, 3, target_batch_size=SAMPLES, patience=0).begin()
    world.run()
    assert not trainer.end.in_step
    assert "trains alone" in trainer.end.reason


def test_a_peer_that_waits_says_for_what(caplog: pytest.LogCaptureFixture) -> None:
    waited: list[float] = []

    def nobody(peers: int, seconds: float) -> bool:
        waited.append(seconds)
        return False

    core = SimpleNamespace(clock=lambda: sum(waited))
    run: Any = SimpleNamespace(name="text", core=core, wait_for=nobody, state=NoPeers())
    wait_for([run], 1)
    assert waited == [NOTICE_SECONDS, WAIT_SECONDS - NOTICE_SECONDS]
    assert [record.message for record in caplog.records] == [
        "run text: waits for 1 other peer: no other peer of this run is known",
        "run text: after 60 s it goes on without waiting for 1 other peer",
    ]
