"""Views: the peers that serve, one set after another, and the machine by which a peer enters them.

A round of the run names the members of a view, alike to all of them. Rounds may be held on both sides of a split, so a
round alone makes no view active. A view is active when all its members have entered it, and said so, and it goes on
from each earlier view that may be active: the last that was active at a member, and those that the member has entered
since (dynamic voting: Yeger Lotem, Keidar and Dolev, "Dynamic voting for consistent primary components", 1997). It
goes on from a view if it has more than half of its members, or half with that of the smallest PeerID (dynamic linear
voting: Jajodia and Mutchler, "Dynamic voting algorithms for maintaining the consistency of a replicated database",
1990). Members that have left, as they said themselves, do not count: they are on neither side. A peer enters views of
rising numbers only. So two views that go on from one view share a member, which entered
one of them first, and the other is active only if it goes on from that one.

```
outside --a round: enter--> entered --Entered of all members--> active
              ^                |                                  |
              +----------------+------- the next round: enter ----+
```
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from equipoise.averaging.draw import draw
from equipoise.averaging.options import MAX_GROUP_SIZE
from equipoise.averaging.outcome import SHOWN_CHARS
from equipoise.averaging.shared.messages import MAX_EARLIER, SHARDS, Entered
from equipoise.limits import LruDict


class View(NamedTuple):
    """The peers that serve together: PeerIDs, sorted, and the number of the round that named them."""

    number: int
    members: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name for messages: two views of one number differ in their members."""
        return f"{self.number}.{hashlib.sha256(' '.join(self.members).encode()).hexdigest()[:8]}"

    def holders(self, shard: int, copies: int = 1) -> tuple[str, ...]:
        """Return the peers that hold a shard, its owner first, alike for all.

        By rendezvous hashing (Thaler and Ravishankar, 1998): a member that goes moves only what it held.
        """
        return _ranked(self.members, shard)[:copies]

    def lacks(self, stay: Collection[str], left: Mapping[str, int] = MappingProxyType({})) -> str:
        """Say why those that stay of its members cannot go on from it; empty if they can.

        Args:
            stay: PeerIDs.
            left: PeerID -> the number of the last view of a peer that has left.
        """
        bound = [peer for peer in self.members if left.get(peer, -1) < self.number]
        stay = {*stay}.intersection(bound)
        half, first = len(bound) / 2, min(bound, default="")
        if len(stay) > half or (len(stay) == half and (not half or first in stay)):
            return ""
        told = f"{len(stay)} of the {len(bound)} peers of view {self.number} are there"
        return f"{told}, and go on only as more than half, or as half with ..{first[-SHOWN_CHARS:]}"


def latest(entered: Mapping[str, Entered]) -> tuple[tuple[int, int], ...]:
    """Return the latest (view, version) of each shard that a member holds; zeros of one that nobody holds."""
    held = [one for each in entered.values() for one in each.held]
    return tuple(max((one[1:] for one in held if one[0] == at), default=(0, 0)) for at in range(SHARDS))


@functools.lru_cache(maxsize=1024)
def _ranked(members: tuple[str, ...], shard: int) -> tuple[str, ...]:
    return draw(members, f"{shard} ", fraction=1.0, minimum=0)


class Views:
    """The views of one peer.

    Attributes:
        view: The view that it entered last; of nobody before the first.
        mine: What it tells the members of that view.
        active: Whether that view is active.
        entered: What its members said when they entered it.
        refused: Why this peer has not entered the view that the last round named; empty if it has.
        patient: Whether the view waits for a holder of each shard.
        lost: Shards whose holders the view does not have.
        left: The peers that have left, each with the number of its last view.
    """

    def __init__(self, copies: int) -> None:
        self.view, self.mine, self.active, self.refused = View(0, ()), Entered(), False, ""
        self.patient, self.lost, self._copies = True, set[int](), copies
        self.entered: dict[str, Entered] = {}
        self.left = LruDict[str, int](MAX_GROUP_SIZE)
        self._early: LruDict[str, tuple[str, Entered]] = LruDict(MAX_GROUP_SIZE)
        self._earlier: tuple[View, ...] = ()

    def enter(
        self,
        view: View,
        clock: int,
        held: tuple[tuple[int, int, int], ...],
        known: tuple[tuple[int, int], ...],
    ) -> bool:
        """Enter a later view, unless it never can be active and would only bind later ones."""
        if view.number <= self.view.number:
            return False
        lacks = [one.lacks(view.members, self.left) for one in self._earlier]
        if len(lacks) == MAX_EARLIER:
            lacks.append(f"this peer has entered {MAX_EARLIER} views in a row, and no view became active")
        self.refused = next(filter(None, lacks), "")
        if self.refused:
            return False
        last = self.view.number if self.active else self.mine.last
        first, left = self.mine.first or view.number, tuple(self.left.items())
        self.mine = Entered(last, first, self._earlier, clock, held, known, left)
        self.view, self.active, self.patient = view, False, True
        early = [(peer, one) for peer, (name, one) in self._early.items() if name == view.name]
        self.entered = {peer: one for peer, one in early if peer in view.members}
        if all(one.members != view.members for one in self._earlier):
            self._earlier += (view,)
        return True

    def heard(self, peer: str, name: str, entered: Entered) -> None:
        """Note that a peer has entered a view, maybe before this one."""
        for one, number in entered.left:
            self.note_left(one, number)
        if name != self.view.name:
            self._early[peer] = name, entered
        elif peer in self.view.members:
            self.entered[peer] = entered

    def note_left(self, peer: str, number: int) -> None:
        """Note that a peer has left, whose last view had that number."""
        self.left[peer] = max(number, self.left.get(peer, 0))

    @property
    def mates(self) -> frozenset[str]:
        """The members of all views that this peer has a say in."""
        return frozenset(peer for one in (*self._earlier, self.view) for peer in one.members)

    def begin(self) -> bool:
        """Return whether the view becomes active."""
        if self.active or self.objection:
            return False
        self.active, self._earlier = True, (self.view,)
        return True

    @property
    def objection(self) -> str:
        """Why the view is not active; empty if it is. Finds out what is `lost`.

        A script that was started again after an earlier view counts for none of its members.
        """
        if self.active or not self.view.number:
            return "" if self.active else "no round has named a view yet"
        if silent := [f"..{peer[-SHOWN_CHARS:]}" for peer in self.view.members if peer not in self.entered]:
            return f"view {self.view.number}, which {', '.join(silent)} did not enter yet"
        self.lost, found = set(), latest(self.entered)
        for entered in self.entered.values():
            self.lost |= {at for at, known in enumerate(entered.known) if found[at] < known}
        for number, members in sorted({one for entered in self.entered.values() for one in entered.earlier}):
            view = View(number, members)
            stay = {peer for peer, one in self.entered.items() if one.first <= number}
            if lack := view.lacks(stay, self.left):
                return lack
            self.lost |= {at for at in range(SHARDS) if stay.isdisjoint(view.holders(at, self._copies))}
        return f"a peer that holds shards {sorted(self.lost)}" if self.lost and self.patient else ""
