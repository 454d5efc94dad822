"""Machines with one rule of the agreement broken: a simulator that does not find them proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce import paxos
from equipoise.averaging.allreduce.failure_detector import Attendance
from equipoise.averaging.allreduce.messages import Vote
from equipoise.averaging.allreduce.part_table import Means, PartTable
from equipoise.averaging.allreduce.paxos import Inheritance, Paxos, Tally
from sim.test_channels import cut_off_at
from simulator.core import Violation
from simulator.explore import Explorer
from simulator.scenario import draw_scenario
from simulator.searches import Search
from simulator.world import World

THREE = Search((1.0, 2.0, 3.0), owner=1, crashes=1)

Patch = Callable[[pytest.MonkeyPatch], None]


def inherits_nothing(patch: pytest.MonkeyPatch) -> None:
    """A new leader decides freely, whatever others hold."""
    patch.setattr(paxos, "inherited", lambda promises, size: Inheritance())


def what_is_inherited_never_binds(patch: pytest.MonkeyPatch) -> None:
    """Nobody need fetch from the late what a majority may hold."""
    plain = paxos.inherited
    patch.setattr(paxos, "inherited", lambda *args: plain(*args)._replace(binding=False))
    patch.setattr(Attendance, "late", property(lambda self: -1, lambda self, late: None), raising=False)


def promises_hide_what_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Paxos, "promise", lambda self: wire.Promise(self.ballot.number))


def one_vote_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paxos, "is_majority", lambda mask, size: mask != 0)


@pytest.mark.parametrize(
    "mutate",
    [
        inherits_nothing,
        what_is_inherited_never_binds,
        promises_hide_what_is_held,
        one_vote_is_enough,
    ],
)
def test_the_explorer_finds(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Violation, match="members that report ok differ"):
        Explorer(THREE).run()


def the_lost_are_given_up_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Attendance, "hoped_for", Attendance.here)


def means_are_dropped_with_the_connection(patch: pytest.MonkeyPatch) -> None:
    """Who finished keeps nothing for those whose connection broke a moment ago."""
    patch.setattr(Attendance, "given_up_at", 0.0)


def test_the_explorer_finds_impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    the_lost_are_given_up_at_once(monkeypatch)
    with pytest.raises(Violation, match="failed: "):
        Explorer(Search((1.0, 2.0), blips=1, must_succeed=True)).run()


def test_a_member_that_is_cut_off_finds_means_that_are_dropped_too_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    means_are_dropped_with_the_connection(monkeypatch)
    with pytest.raises(Violation, match="failed: "):
        any(cut_off_at(step) is None for step in range(60))


def half_is_a_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paxos, "is_majority", lambda mask, size: 2 * mask.bit_count() >= size)


def owners_reduce_what_they_have(patch: pytest.MonkeyPatch) -> None:
    """Late contributions are left out by the owner instead of by the decision."""
    plain = PartTable._reduce
    patch.setattr(
        PartTable,
        "_reduce",
        lambda self, part, over: plain(self, part, over & (self.arrivals._arrived[part] | 1 << self.me)),
    )


def digests_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    plain = Tally.add

    def add(self: Tally, vote: Vote, voters: int) -> bool:
        return plain(self, Vote(vote.ballot, vote.decision, bytes(32)), voters)

    patch.setattr(Tally, "add", add)
    patch.setattr(Means, "digest", lambda self, decision: bytes(32))


@pytest.mark.parametrize(
    ("mutate", "sizes", "seeds"),
    [
        (half_is_a_majority, (4, 4), range(100)),
        (owners_reduce_what_they_have, (2, 7), range(500)),
        (digests_are_not_compared, (2, 7), range(500)),
    ],
)
def test_seeds_find(
    mutate: Patch, sizes: tuple[int, int], seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Violation):
        simulate(seeds, sizes)


def simulate(seeds: range, sizes: tuple[int, int]) -> None:
    for seed in seeds:
        World(draw_scenario(seed, sizes)).run()
