"""Strangers with another state: those who have trained together keep theirs, whatever the strangers' number."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from equipoise.averaging.counts import count
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.snapshot_quorum import SnapshotQuorum
from equipoise.peer.training.events import RoundEnded
from equipoise.peer.training.lineage import beginning
from equipoise.peer.training.replica import ATTENDANCE, MAX_KNOWN, Known, Phase, Replica
from fakes import rounds
from fakes.trainers import SAMPLES, Trainer, assert_alike
from fakes.world import World
from oracles.training import network

OURS, THEIRS = StateId(7, "a" * 64), StateId(2**40, "b" * 64)


class Stranger(Trainer):
    """It comes with a state of its own, of any epoch, that nobody else has heard of."""

    def join(self) -> None:
        self.model = network(seed=7)
        super().join()
        self.opt.load(self.opt.member._subject.state.image(THEIRS))


def of(claims: Mapping[str, StateId | None], missing: int = 0) -> RoundEnded:
    states = {name: state for name, state in claims.items() if state is not None}
    weights = dict.fromkeys(claims, 8.0)
    return rounds.succeeded(states, "m", weights, sorted(claims), missing)


def known(*names: str) -> Known:
    mine = Known("a", "known", 10.0, 0.0)
    mine.add(names)
    return mine


@pytest.mark.parametrize("strangers", [4, 20])
def test_newcomers_with_another_state_do_not_replace_that_of_three_who_have_trained(
    world: World, strangers: int
) -> None:
    world.options["group_size"] = 64
    ours = [Trainer(world, index, 30, target_batch_size=3 * SAMPLES).begin() for index in range(3)]
    for index in range(3, 3 + strangers):
        stranger = Stranger(world, index, THEIRS.epoch + 5, target_batch_size=3 * SAMPLES)
        stranger.begin(at=5.0)
    world.run()
    assert_alike(ours)
    assert all(trainer.opt.epoch == 30 for trainer in ours)
    steps = [epoch for epoch, _ in ours[0].seen]
    assert len(steps) <= 30 / 0.8, "at least 80 % of the steps are updates"
    told = [reason for _, reason in ours[0].seen if "keeps its own state" in reason]
    assert told[0] == (
        f"this peer keeps its own state: epoch {THEIRS.epoch} (bbbbbbbb) is that of "
        f"{count(strangers, 'other peer')}, with none of which it has trained; "
        'pass trust="heads" to follow the majority'
    )


def test_where_heads_are_trusted_most_are_followed(world: World) -> None:
    options = {"target_batch_size": 3 * SAMPLES, "trust": "heads"}
    ours = [Trainer(world, index, THEIRS.epoch + 5, **options).begin() for index in range(3)]
    strangers = [Stranger(world, index, THEIRS.epoch + 5, **options).begin(at=5.0) for index in range(3, 7)]
    world.run()
    assert_alike([*ours, *strangers])


def test_who_has_trained_with_nobody_follows_most() -> None:
    assert known().group(of({"a": OURS, "b": THEIRS, "c": THEIRS}), 1.0) == THEIRS


def test_who_was_cut_off_comes_back_to_those_it_has_trained_with() -> None:
    machine = Replica("a", beginning("start"), 0.0)
    machine.handle(of(dict.fromkeys("abc", machine.state)), 0.0)
    assert machine.phase is Phase.IN_STEP
    later = StateId(9, "c" * 64)
    machine.handle(of({"a": machine.state, "b": later, "c": later, **dict.fromkeys("mno", THEIRS)}), 60.0)
    assert machine.phase is Phase.ASTRAY
    assert machine.reason.startswith("astray: it holds epoch 1")
    assert "the group epoch 9" in machine.reason


def test_of_those_it_has_trained_with_most_are_followed() -> None:
    claims = {"a": OURS, "b": THEIRS, "c": THEIRS, "m": OURS, "n": OURS}
    assert known("b", "c").group(of(claims), 1.0) == THEIRS


def test_strangers_are_followed_where_none_is_left_and_only_after_a_while() -> None:
    mine, alone = known("b", "c"), of({"a": OURS, "m": THEIRS, "n": THEIRS})
    assert [mine.group(alone, at) for at in (1.0, 5.0, 9.9)] == [OURS] * 3
    assert mine.group(of({"a": OURS, "b": OURS, "m": THEIRS, "n": THEIRS}), 11.0) == OURS
    assert [mine.group(alone, at) for at in (12.0, 16.0, 20.9)] == [OURS] * 3
    assert mine.group(of({"a": OURS, "m": THEIRS, "n": THEIRS}, missing=1), 30.0) == OURS, "it may be one"
    assert mine.group(alone, 21.0) == THEIRS


def test_strangers_are_not_followed_for_one_slow_round() -> None:
    mine, alone = known("b", "c"), of({"a": OURS, "m": THEIRS, "n": THEIRS})
    assert [mine.group(alone, at) for at in (15.0, 30.0, 45.0)] == [OURS, OURS, THEIRS]


def test_of_two_islands_the_one_of_which_one_is_left_joins_the_other() -> None:
    one, other = known("b"), Known("m", "known", 10.0, 0.0)
    other.add(["n"])
    met = of({"a": THEIRS, "m": OURS, "n": OURS})
    for at in (18.0, 19.0):
        assert one.group(met, at) == THEIRS
    assert one.group(met, 20.0) == OURS == other.group(met, 20.0)


def test_an_astray_peer_among_strangers_alone_waits_for_those_it_knows() -> None:
    assert known("b").group(of({"a": None, "m": THEIRS}), 1.0) is None


def test_a_peer_that_claims_the_groups_state_and_gives_nothing_is_not_one_of_them() -> None:
    mine = Replica("a", OURS, 0.0)
    states = dict.fromkeys("abm", OURS)
    weights = {"a": 8.0, "b": 8.0, "m": ATTENDANCE}
    mine.handle(rounds.succeeded(states, "m", weights, ["a", "b", "m"]), 0.0)
    assert mine.known.names == ("b",)


def test_those_remembered_are_bounded_and_the_recent_stay() -> None:
    mine = known("b")
    for number in range(2 * MAX_KNOWN):
        mine.add([f"s{number}", "b"])
    assert len(mine._names) == MAX_KNOWN
    assert "b" in mine._names


def test_a_peer_that_was_cut_off_among_strangers_gets_the_state_of_those_it_knows(world: World) -> None:
    """It comes back when the means are forgotten, so it needs a snapshot, and most offer that of the strangers."""
    ours = [Trainer(world, index, 50, target_batch_size=3 * SAMPLES).begin() for index in range(3)]
    for index in range(3, 7):
        Stranger(world, index, THEIRS.epoch + 60, target_batch_size=3 * SAMPLES).begin(at=2.0)

    def cut() -> None:
        world.compute(4.0)
        world.net.cut("peer2")
        world.compute(7.0)
        world.net.cuts.clear()

    world.peer("weather", cut)
    world.run()
    assert any("caught up with the group" in reason for _, reason in ours[2].seen)
    assert_alike(ours)


def test_a_snapshot_is_asked_of_those_it_knows_while_one_is_there() -> None:
    poll = SnapshotQuorum(3, among=frozenset("bc"))
    assert poll.see(("b", "m", "n"), 0.0) == ["b"]
    assert sorted(poll.see(("m", "n"), 1.0)) == ["m", "n"]
    assert poll.see(("c", "m", "n"), 2.0) == ["c"]
    poll.bar("c", "sent a wrong byte")
    assert sorted(poll.see(("c", "m", "n"), 3.0)) == ["m", "n"]
