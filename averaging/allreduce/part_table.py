"""The parts that one member has sent, received and reduced in a round: the bookkeeping under `AllReduce`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from equipoise.averaging.allreduce.events import Action, Group, Reduce, SendContribution, SendMean
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.allreduce.paxos import members_of
from equipoise.averaging.partition import assign


def mean_digest(round_id: bytes, contributors: int, parts: Iterable[bytes]) -> bytes:
    """SHA-256 over the round, the contributors (a bitmask) and the digests of all parts of their mean.

    The mask takes 8 bytes; it takes more only in a simulation, whose groups may have more members than real ones.
    """
    mask = contributors.to_bytes(max(8, -(-contributors.bit_length() // 8)), "little")
    return hashlib.sha256(round_id + mask + b"".join(parts)).digest()


def early_parts(group: Group) -> int:
    """Most contributions of one member that are kept for parts of other owners: about one vector from all members.

    A contribution may overtake the plan that gives us the part, since a dead owner's parts go to all the others.
    """
    return -(-len(group.parts) // max(group.size - 1, 1))


class Arrivals:
    """The contributions to each part that have come.

    Attributes:
        mine: The parts of which this member is, or was, the owner.
        whole: Bitmask of the contributors whose contributions to all our parts are here.
    """

    def __init__(self, group: Group, me: int) -> None:
        self._group = group
        self._me = me
        self.mine: set[int] = set()
        self.whole = group.contributors
        self._arrived = [0] * len(group.parts)
        self._early: Counter[int] = Counter()
        self._lacking = [0] * group.size

    def assign(self, mine: list[int]) -> None:
        """Own these parts from now on."""
        self.mine.update(mine)
        self.whole = self._group.contributors
        for member in members_of(self._group.contributors & ~(1 << self._me)):
            here = sum(self._arrived[part] >> member & 1 for part in mine)
            self._lacking[member] = len(mine) - here
            if self._lacking[member]:
                self.whole ^= 1 << member

    def wants(self, sender: int, part: int) -> bool:
        """True if a contribution can count, is not here yet, and this member may have to reduce it."""
        return (
            part < len(self._group.parts)
            and sender != self._me
            and bool(self._group.contributors >> sender & 1)
            and not self._arrived[part] >> sender & 1
            and (part in self.mine or self._early[sender] < early_parts(self._group))
        )

    def take(self, sender: int, part: int, is_mine: bool) -> None:
        """Take a wanted contribution to a part, which may be this member's now."""
        self._arrived[part] |= 1 << sender
        if part not in self.mine:
            self._early[sender] += 1
        if is_mine:
            self._lacking[sender] -= 1
            if not self._lacking[sender]:
                self.whole |= 1 << sender

    def has(self, part: int, contributors: int) -> bool:
        """True if the contributions of all these members to `part` are here; our own always is."""
        return not contributors & ~(self._arrived[part] | 1 << self._me)


class Means:
    """The means of parts that are here, each with its contributors, a bitmask, and its digest."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._means: dict[int, tuple[int, bytes]] = {}
        self._kept: Counter[int] = Counter()
        self._dropped: dict[int, tuple[int, bytes]] = {}

    def has(self, part: int, contributors: int) -> bool:
        """True if the mean of `part` over `contributors` is here."""
        return self._means.get(part, (0, b""))[0] == contributors

    def wants(self, part: int, contributors: int) -> bool:
        """True if a mean of this part over these contributors is not here yet."""
        return part < len(self._group.parts) and not self.has(part, contributors)

    def take(self, part: int, contributors: int, digest: bytes) -> None:
        """Take a wanted mean, in place of any other of that part."""
        if part in self._means:
            before = self._means[part][0]
            self._kept[before] -= 1
            if not self._kept[before]:
                del self._kept[before]
        self._kept[contributors] += 1
        self._means[part] = (contributors, digest)

    def drop(self) -> None:
        """Forget every mean, but for `changed`."""
        self._dropped = dict(self._means)
        self._means.clear()
        self._kept.clear()

    @property
    def changed(self) -> list[int]:
        """The parts whose mean was dropped, and is another one now."""
        return [part for part, mean in self._dropped.items() if self._means.get(part, mean) != mean]

    def is_whole(self, decision: Decision) -> bool:
        """True if all parts of the decision's mean are here."""
        return self._kept[decision.contributors] == len(self._group.parts)

    def digest(self, decision: Decision) -> bytes:
        """The digest of the decision's mean, whose parts are all here."""
        parts = (self._means[part][1] for part in range(len(self._group.parts)))
        return mean_digest(self._group.round_id, decision.contributors, parts)

    def shares(self, owner_of: Sequence[int]) -> tuple[bytes, ...]:
        """4 bytes of a digest of each member's share of the mean, as it is here."""
        given: list[list[bytes]] = [[] for _ in range(self._group.size)]
        for part, owner in enumerate(owner_of):
            given[owner].append(self._means.get(part, (0, b""))[1])
        return tuple(hashlib.sha256(b"".join(digests)).digest()[:4] for digests in given)


class PartTable:
    """The owner of each part, and the transfers that are due.

    Attributes:
        arrivals: The contributions that are here.
        means: The means that are here.
        owner_of: The owner of each part, which reduces it.
        owners: Bitmask of the members that have parts to reduce.
        due: The parts that `work` must look at.
    """

    def __init__(self, group: Group, me: int) -> None:
        self.group = group
        self.me = me
        self.arrivals = Arrivals(group, me)
        self.means = Means(group)
        self.owner_of: tuple[int, ...] = ()
        self.owners = 0
        self._dealt_to = 0
        self.due: set[int] = set()
        self._others = [(me + step) % group.size for step in range(1, group.size)]
        self._turns: list[int] = []
        self._sent: set[tuple[int, int]] = set()
        self._reducing: dict[int, int] = {}
        self._mean_sent: dict[int, tuple[int, int]] = {}

    def assign(self, owners: int) -> None:
        """Deal the parts out to the members in the bitmask `owners`."""
        self.due = set(range(len(self.group.parts)))
        if owners == self._dealt_to:
            return
        self._dealt_to = owners
        self.owner_of = assign(self.group.parts, owners)
        self.owners = sum(1 << owner for owner in set(self.owner_of))
        # Each member starts with its successor, so that not all send to the same member first.
        self._turns = [(owner - self.me) % self.group.size for owner in self.owner_of]
        self.arrivals.assign([part for part, owner in enumerate(self.owner_of) if owner == self.me])

    def take_contribution(self, sender: int, part: int) -> None:
        """Take a wanted contribution."""
        is_mine = self.owner_of[part] == self.me
        self.arrivals.take(sender, part, is_mine)
        if is_mine:
            self.due.add(part)

    def take_mean(self, part: int, contributors: int, digest: bytes) -> None:
        """Take a wanted mean, in place of any other of that part."""
        self.means.take(part, contributors, digest)
        if self.owner_of[part] == self.me:
            self.due.add(part)

    def forget_reducing(self, part: int, contributors: int) -> None:
        """Note that a reduction has ended: if the part's mean is wanted again, it is reduced again."""
        if self._reducing.get(part) == contributors:
            del self._reducing[part]

    @property
    def false_owners(self) -> int:
        """Bitmask of the owners of parts whose mean was dropped, and is another one now."""
        return sum(1 << owner for owner in {self.owner_of[part] for part in self.means.changed})

    def missing_of(self, owners: int, decision: Decision) -> frozenset[int]:
        """The parts of the decision's mean that are not here and belong to members in the bitmask `owners`."""
        if not owners & self.owners:
            return frozenset()
        return frozenset(
            part
            for part, owner in enumerate(self.owner_of)
            if owners >> owner & 1 and not self.means.has(part, decision.contributors)
        )

    def work(self, over: int, decided: bool, release_means: bool, targets: int) -> list[Action]:
        """For each due part: send our contribution, reduce it, or send its mean.

        Args:
            over: Bitmask of the contributors that count, or are expected to count.
            decided: Whether the contributors are decided, so that contributions need not be sent any more.
            release_means: Whether the means over these contributors may be sent.
            targets: Bitmask of the members to send to.
        """
        due, self.due = self.due, set()
        actions: list[Action] = []
        for part in sorted(sorted(due), key=self._turns.__getitem__):
            if self.owner_of[part] != self.me:
                if not decided:
                    actions += self._contribute(part, targets)
            elif not self.means.has(part, over):
                actions += self._reduce(part, over)
            elif release_means:
                actions += self._send_mean(part, over, targets)
        return actions

    def _contribute(self, part: int, targets: int) -> list[Action]:
        owner, contributes = self.owner_of[part], self.group.contributors >> self.me & 1
        if not contributes or not targets >> owner & 1 or (part, owner) in self._sent:
            return []
        self._sent.add((part, owner))
        return [SendContribution(owner, part)]

    def _reduce(self, part: int, over: int) -> list[Action]:
        if not self.arrivals.has(part, over) or self._reducing.get(part) == over:
            return []
        self._reducing[part] = over
        return [Reduce(part, over)]

    def _send_mean(self, part: int, over: int, targets: int) -> list[Action]:
        sent_over, sent_to = self._mean_sent.get(part, (over, 0))
        done = sent_to if sent_over == over else 0
        self._mean_sent[part] = (over, done | targets)
        new = targets & ~done
        return [SendMean(to, part, over) for to in self._others if new >> to & 1]
