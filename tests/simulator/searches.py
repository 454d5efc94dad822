"""Which small groups are explored wholly, under which faults, and what is found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from equipoise.averaging.allreduce.events import Group
from simulator.scenario import group_of

TIMEOUT_SECONDS = 11.0
"""Long enough for the first two in line to open ballots after three and four stalls of 2 s."""

WEIGHTS = (1.0, 2.0, 3.0, 4.0)

OBSERVER_LAST = (1.0, 2.0, 0.0)


@dataclass(frozen=True, slots=True)
class Search:
    """What to explore.

    Attributes:
        weights: One per member; 0 observes.
        owner: Who owns the one part.
        dialable: Bitmask of the members that can be dialled.
        crashes: Most members that crash.
        cuts: Most connections that break for good.
        blips: Most connections that break and stand again.
        duplicates: Most frames that are delivered twice.
        early: Most wakes that come although frames are under way: pauses longer than a stall.
        any_order: Whether frames between two members may overtake each other.
        must_succeed: Whether it is an error if a living member fails.
        timeout: Seconds after which rounds fail.
    """

    weights: tuple[float, ...]
    owner: int = 0
    dialable: int = -1
    crashes: int = 0
    cuts: int = 0
    blips: int = 0
    duplicates: int = 0
    early: int = 0
    any_order: bool = False
    must_succeed: bool = False
    timeout: float = TIMEOUT_SECONDS

    def describe(self) -> str:
        """The options that are not as usual."""
        usual = Search(())
        changed = (name for name in self.__slots__ if getattr(self, name) != getattr(usual, name))
        return ", ".join(f"{name}={getattr(self, name)}" for name in changed)

    @property
    def group(self) -> Group:
        """The group of the round, led by member 0."""
        return group_of((self.owner,), self.weights, self.dialable)


@dataclass(slots=True)
class Findings:
    """What a search has found.

    Attributes:
        states: Distinct states visited.
        steps: Transitions taken.
        ends: In how many states all have ended so: one letter per member, `o`k, `f`ailed, or `x`, crashed before.
    """

    states: int = 0
    steps: int = 0
    ends: Counter[str] = field(default_factory=Counter)


def crashes_and_orders(size: int) -> list[Search]:
    """Groups of `size`: every owner of the part, every crash of all but one, every order with and without overtaking.

    Where a minority crashes, everyone else must succeed.
    """
    minority = (size - 1) // 2
    searches = []
    for owner in range(size):
        plain = Search(WEIGHTS[:size], owner)
        for any_order in (False, True):
            searches.append(replace(plain, any_order=any_order, crashes=size - 1))
            searches.append(replace(plain, any_order=any_order, crashes=minority, must_succeed=True))
    if size == 3:
        searches += [
            Search(OBSERVER_LAST, 0, crashes=2, any_order=True),
            Search(OBSERVER_LAST, 2, crashes=2, any_order=True),
            Search(WEIGHTS[:3], 0, dialable=0b001, crashes=2, any_order=True),
            Search(WEIGHTS[:3], 1, dialable=0b011, crashes=2, any_order=True),
        ]
    return searches


def further_faults(size: int) -> list[Search]:
    """The same groups with connections that break, frames that come twice, and pauses; minutes for three members."""
    searches = []
    if size == 3:
        searches.append(Search(WEIGHTS[:3], dialable=0b001, blips=1, any_order=True, must_succeed=True))
    for owner in range(size):
        plain = Search(WEIGHTS[:size], owner)
        if size == 2:
            everything = replace(plain, crashes=1, cuts=1, blips=1, duplicates=1, early=1)
            searches += [everything, replace(everything, any_order=True, duplicates=0)]
            back = replace(plain, blips=3, must_succeed=True)
            searches += [back, replace(back, any_order=True), replace(back, duplicates=1)]
            continue
        searches += [
            replace(plain, cuts=1, must_succeed=True),
            replace(plain, blips=1, must_succeed=True),
            replace(plain, duplicates=2, must_succeed=True),
            replace(plain, crashes=1, duplicates=1, must_succeed=True),
            replace(plain, crashes=1, early=1, must_succeed=True),
            replace(plain, crashes=1, cuts=1),
            replace(plain, crashes=1, blips=1),
        ]
    return searches
