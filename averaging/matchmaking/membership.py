"""A peer's knowledge of the others in its run: the live peers, their rounds, their groups, and the coordinators.

A record in the directory costs nothing, so it proves nothing. A peer is *met* once it has answered this one. Plans of
groups and believed round numbers use only peers that were met. A record only names a peer to ask.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Set
from typing import NamedTuple

import msgspec

from equipoise.averaging.matchmaking.topology import Groups, plan, rank, ranked, seats
from equipoise.averaging.timing import SILENT_SECONDS
from equipoise.limits import Candidate, LruDict

MAX_PEERS = 4096
"""Most peers of one run that are considered; a directory that shows more is flooded."""

SUSPECT_SECONDS, MAX_SUSPECT_SECONDS = 5.0, 20.0
"""Shortest and longest time for which an unreachable peer is not asked, unless it is heard from. Each further failure
doubles the time: an attempt may cost seconds of waiting for an answer, but the peer may only have been busy. In about
the longest time the record of a dead peer expires, and peers whose network has healed find each other."""

WARM_SECONDS = 50.0
"""Longest time since the last word of a peer after which its channel counts as open: a minute idle closes it."""

DIAL_SECONDS = 5.0
"""Extra time to answer for a peer without an open channel: to open one to a distant peer takes seconds."""

SHUN_SECONDS = 30.0
"""Time for which a coordinator that has cost more time than most honest ones is not asked first. This does not prove
bad intent: a coordinator whose own trainer is slow looks the same."""

MAX_ASKED = 8
"""Most peers known only by their records that are asked at each look at the directory whether they are there. Forty
peers that start together have met within four looks, and 4,000 false records cost eight messages a look."""

MAX_SHUNNED = 64
"""Most coordinators shunned at once; beyond that, the oldest entry is dropped."""

SETTLE_SECONDS = 2.0
"""Time without a new peer after which the peers of a run that begins have most likely met: then all see alike which of
them have the first places. A directory shows new peers within a second."""

TURN_EPOCHS = 8
"""Epochs for which the same peers may take the places that fall free: those that follow a state are a little behind."""

MISSES = 2
"""Most rounds in a row in which a group waits for a peer in vain. After that it waits for the peer again only once the
peer has sent a join: a record in the directory costs nothing."""

LEAP = 1000
"""Most rounds that a peer skips at a time, and that the word of one other peer can make it skip. The directory is never
so many rounds behind."""

MAX_JUMP = 2**40
"""Highest round number at which a newcomer begins on the word of others. From there numbers grow only by rounds and by
`LEAP`, so no lie of others brings them to `MAX_ROUND`."""

MAX_PLANS = 8
"""Most plans kept: this round's, the next ones', and some for peers that are behind."""


class _Other(msgspec.Struct):
    """One other peer of the run, with the same spec: its record, and what this peer knows from it or others."""

    record: Candidate
    ready: bool
    round: int
    dialable: bool
    mate: bool = False
    apart: bool = False
    placed: bool = False
    gone: bool = False
    misses: int = 0
    losses: int = 0
    suspect_until: float = float("-inf")
    asked_at: float = float("inf")
    heard_at: float = float("-inf")

    @property
    def met(self) -> bool:
        """True if the peer has ever answered."""
        return self.heard_at > float("-inf")

    @property
    def answers(self) -> bool:
        """True if the peer has answered since it was last lost."""
        return self.met and self.losses == 0


class _Made(NamedTuple):
    """The peers that made the state of an epoch."""

    epoch: int = 0
    peers: frozenset[str] = frozenset()


class _Shun(msgspec.Struct):
    until: float
    may_call: bool


class Membership:
    """One peer's view of the peers of its run. Times are the seconds of one monotonic clock.

    Attributes:
        observes: Whether this peer trains nothing, so that it does not draw itself.
        places: Whether all peers hold one state, so that a round has one group.
    """

    def __init__(self, peer: str, spec: str, group_size: int, places: bool = False) -> None:
        self.peer = peer
        self.dialable = True
        self.observes = False
        self._own: Candidate | None = None
        self.own_misses = 0
        self.seen_at = float("-inf")
        self.changed_at = float("-inf")
        self._spec = spec
        self._group_size = group_size
        self.places = places
        self._made = _Made()
        self._others: dict[str, _Other] = {}
        self._early: LruDict[str, float] = LruDict(MAX_PEERS)
        self._shunned: LruDict[str, _Shun] = LruDict(MAX_SHUNNED)
        self._plans: LruDict[int, Groups] = LruDict(MAX_PLANS)

    def see(self, candidates: Iterable[Candidate], now: float) -> None:
        """Take over a view of the directory; knowledge that came from the peers themselves stays."""
        candidates, met = list(candidates), self.met
        self._own = next((record for record in candidates if record.peer == self.peer), None)
        others = [record for record in candidates if record.peer != self.peer and record.spec == self._spec]
        known, self._others = self._others, {}
        for record in others[:MAX_PEERS]:
            heard_at = self._early.pop(record.peer, float("-inf"))
            other = known.get(record.peer) or _Other(
                record, record.ready, record.round, record.dialable, heard_at=heard_at
            )
            self._others[record.peer] = other
            other.record, other.ready, other.dialable = record, record.ready, record.dialable
            self.advance(record.peer, record.round)
        self.seen_at = now
        if set(met) != set(self.met):
            self._change(now)

    @property
    def count(self) -> int:
        """The number of other peers that answer; if any does, records count for peers that this one cannot reach."""
        answering = sum(other.answers for other in self._others.values())
        return answering and answering + sum(self._out_of_reach(other) for other in self._others.values())

    @property
    def why_nobody(self) -> str:
        """Why no other peer answers, one line."""
        return f"no other peer of this run {'has answered' if self._others else 'is known'}"

    @property
    def met(self) -> list[str]:
        """The other peers that have ever answered, dead or alive, and the peers that this one cannot reach at all."""
        return [peer for peer, other in self._others.items() if self._is_met(other)]

    def answers(self, peer: str) -> bool:
        """True if the peer has answered this one, and has not been lost since."""
        return peer in self._others and self._others[peer].answers

    def is_mute(self, peer: str) -> bool:
        """True if the peer could not be reached, or did not answer, and has never said anything."""
        other = self._others.get(peer)
        return other is not None and not other.met and other.losses > 0

    def to_ask(self, now: float) -> list[str]:
        """Peers to ask now whether they are there: dialable peers that have not answered so far."""
        silent = (
            (peer, other) for peer, other in self._others.items() if other.dialable and not other.answers
        )
        unknown = (
            peer for peer, other in silent if other.suspect_until <= now and other.asked_at == float("inf")
        )
        # Each peer asks in its own order and is asked by others, so all have met after half the questions.
        return heapq.nsmallest(MAX_ASKED, unknown, key=lambda peer: rank(self.peer, peer))

    def incomplete(self, joined: Set[str], now: float) -> bool:
        """True if peers that have not `joined` may soon be met: their record or message came, and they are not lost."""
        only_records = (other for other in self._others.values() if not self._is_met(other))
        return not self._early.keys() <= joined or any(other.suspect_until <= now for other in only_records)

    def knows(self, peer: str) -> bool:
        """True if the peer is in the run as far as this one can see."""
        return peer == self.peer or peer in self._others

    def lose(self, peer: str, now: float) -> None:
        """Note that the peer could not be reached."""
        other = self._others.get(peer)
        if other is not None and other.suspect_until <= now:
            other.asked_at = float("inf")
            other.suspect_until = now + min(SUSPECT_SECONDS * 2.0**other.losses, MAX_SUSPECT_SECONDS)
            other.losses += 1
            self._free_places()

    def hear(self, peer: str, now: float) -> None:
        """Note that the peer is alive."""
        other = self._others.get(peer)
        if other is None:
            # The peer's record may be on the way; the peer counts as met once the record is here.
            self._early[peer] = now
            return
        first, other.heard_at = not other.met, now
        if other.losses:
            self._free_places()
        other.suspect_until, other.losses, other.asked_at = float("-inf"), 0, float("inf")
        other.gone = False
        if first:
            self._change(now)

    def ask(self, peer: str, now: float) -> None:
        """Note that the peer is asked whether it is there."""
        other = self._others.get(peer)
        if other is not None:
            dial = 0.0 if now - other.heard_at <= WARM_SECONDS else DIAL_SECONDS
            other.asked_at = min(other.asked_at, now + dial)

    def lose_silent(self, now: float) -> None:
        """Lose the peers that were asked and have said nothing for too long."""
        for peer, other in self._others.items():
            if now >= other.asked_at + SILENT_SECONDS:
                other.asked_at = float("inf")
                self.lose(peer, now)

    @property
    def silent_at(self) -> float:
        """When a peer that was asked will have been silent for too long; infinity if none was."""
        return min((other.asked_at for other in self._others.values()), default=float("inf")) + SILENT_SECONDS

    def shun(self, peer: str, now: float, *, excused: bool = False) -> None:
        """Ask others before this peer for a while, alive or not; `excused` if it may call once in that time."""
        before = self._shunned.get(peer)
        may_call = before.may_call if before is not None and now < before.until else excused
        self._shunned[peer] = _Shun(now + SHUN_SECONDS, may_call)

    def shuns(self, peer: str, now: float) -> bool:
        """True if others are asked before the peer for now."""
        return peer in self._shunned and now < self._shunned[peer].until

    def heeds(self, peer: str, now: float) -> bool:
        """Return whether to go to the peer when it calls; that uses up the one call of a shunned peer."""
        if not self.shuns(peer, now):
            return True
        may_call, self._shunned[peer].may_call = self._shunned[peer].may_call, False
        return may_call

    def welcome(self, peer: str, round: int, ready: bool) -> None:
        """Note that the peer takes part, ahead of its next record.

        Its next round is no earlier than `round`. The peer is `ready` for it, or has a group for the round before. It
        was alive when it signed its join, of which this peer may only have heard from the coordinator.
        """
        if other := self._others.get(peer):
            other.misses, other.ready, other.suspect_until = 0, ready, float("-inf")
            self.advance(peer, round)

    def shared(self, peers: Iterable[str]) -> None:
        """Note that this peer shared a round with these peers: their round numbers are believed before all others."""
        for peer in peers:
            if peer in self._others:
                self._others[peer].mate = True

    def part(self, peers: Iterable[str], apart: Set[str]) -> None:
        """Note which of these peers contributed from another state than this peer, in a round that they shared.

        As long as the directory knows another peer of its own state, this peer plans no group with those `apart`: their
        contributions fit another model, and nobody should wait for them. They do the same.
        """
        for peer in peers:
            other = self._others.get(peer)
            if other is not None and other.apart != (peer in apart):
                other.apart = peer in apart
                self._plans.clear()

    def seat(self, holders: Iterable[str], epoch: int, own: bool) -> None:
        """Note which peers made the state of an epoch together: they have the places of the round from there.

        A mean from others may be older than what this peer knows from its `own` rounds.
        """
        if own or epoch >= self._made.epoch:
            self._made = _Made(epoch, frozenset(holders))
            self._free_places()

    def hear_place(self, peer: str, placed: bool) -> None:
        """Note whether a peer says that it has a place; this counts until this peer knows how its state was made."""
        if peer in self._others and self._others[peer].placed != placed:
            self._others[peer].placed = placed
            self._free_places()

    @property
    def holders(self) -> frozenset[str]:
        """PeerIDs of the live peers that made the last known state together; empty if no round has changed a state."""
        return self._there(self._made.peers) or self._there(
            peer for peer, other in self._others.items() if other.placed
        )

    @property
    def makers(self) -> frozenset[str]:
        """All of them but those that cannot be reached: a silent one may be in a group of others."""
        gone = {peer for peer, other in self._others.items() if other.gone}
        return self._made.peers & {self.peer, *self._others} - gone

    def note_gone(self, peer: str) -> None:
        """Note that no channel to a peer can be opened."""
        if peer in self._others:
            self._others[peer].gone = True

    @property
    def placed(self) -> bool:
        """True if this peer is one of them."""
        return self.peer in self._made.peers

    @property
    def crowded(self) -> bool:
        """True if peers that hold one state are more than a group holds."""
        return self.places and len(self._there(self._others)) >= self._group_size

    def settles(self, now: float) -> bool:
        """True while a run that begins may soon have more peers than a group holds: new ones are still met."""
        growing = self.places and now < self.changed_at + SETTLE_SECONDS
        return growing and 2 * len(self._there([self.peer, *self._others])) >= self._group_size

    def waits(self, round: int) -> bool:
        """True if this peer has no place in the round. A place that the last round left empty is open to all: views of
        the next in order differ, and all that hold the state know who made it."""
        left_empty = 0 < len(self._made.peers) < self._group_size
        return self.crowded and not left_empty and self.peer not in self.seated(round)

    def seated(self, round: int) -> tuple[str, ...]:
        """The peers that a round is for: those with a place or, where all peers have one, this peer's planned group."""
        return self.plan(round)[0] if self.crowded else self.group(self.peer, round)

    def _there(self, peers: Iterable[str]) -> frozenset[str]:
        return frozenset(peer for peer in peers if peer == self.peer or self._takes_part(peer))

    def _takes_part(self, peer: str) -> bool:
        other = self._others.get(peer)
        return other is not None and (other.answers or self._out_of_reach(other))

    def _free_places(self) -> None:
        if self.places:
            self._plans.clear()

    def unite(self) -> None:
        """Plan groups with all peers again: this peer has nothing to contribute, and looks for the group's state."""
        self.part(self._others, frozenset())

    def advance(self, peer: str, round: int) -> None:
        """Note that the peer's next round is no earlier than `round`."""
        other = self._others.get(peer)
        if other is not None and round > other.round:
            if round > other.round + LEAP:
                self._plans.clear()
            other.round = round

    def beyond(self, round: int) -> frozenset[str]:
        """The peers whose next round is a later one."""
        return frozenset(peer for peer, other in self._others.items() if other.round > round)

    def miss(self, peers: Iterable[str]) -> None:
        """Note that a group waited for these peers in vain."""
        for peer in peers:
            if peer == self.peer:
                self.own_misses += 1
            elif peer in self._others:
                self._others[peer].misses += 1

    def alive(self, peer: str, now: float) -> bool:
        """True if the peer is in the run, was met, and is not suspected dead."""
        other = self._others.get(peer)
        return peer == self.peer or (other is not None and self._is_met(other) and other.suspect_until <= now)

    def suspects(self, peer: str, now: float) -> bool:
        """True if the peer could not be reached a short time ago."""
        return peer in self._others and self._others[peer].suspect_until > now

    def others(self, now: float) -> list[str]:
        """The live peers other than this one."""
        return [peer for peer in self._others if self.alive(peer, now)]

    def live(self, tags: Iterable[str], data: str = "") -> tuple[str, ...]:
        """The peers that answer and may be drawn, sorted, this one included: they carry all `tags`, and train.

        With `data`, only those that share this data set.

        A lost peer is left out until it has answered again: otherwise it would come and go with every try.
        """
        wanted = frozenset(tags)
        there = ((peer, other) for peer, other in self._others.items() if self._takes_part(peer))
        there = ((peer, other) for peer, other in there if not data or other.record.data == data)
        trains = ((peer, other.record) for peer, other in there if not other.record.observes)
        live = [peer for peer, record in trains if wanted.issubset(record.tags)]
        own = frozenset(() if self._own is None else self._own.tags)
        return tuple(sorted([*live, self.peer] if wanted <= own and not self.observes else live))

    def is_trained(self, peers: Iterable[str]) -> bool:
        """Whether one of these peers is in the run, and holds a trained state by its own word."""
        return any(
            peer in self._others and self._others[peer].record.trained and self._takes_part(peer)
            for peer in peers
        )

    def plan(self, round: int) -> Groups:
        """All groups of the round, of the peers that were met. Peers further than `LEAP` from it cannot come.

        Dead peers keep their places until their records expire, so that all peers compute the same groups. Where peers
        hold one state, and are more than a group holds, a dead peer's place is free at once: one coordinator decides.
        """
        if round not in self._plans:
            near = [peer for peer in self.met if abs(self._others[peer].round - round) <= LEAP]
            alike = [peer for peer in near if not self._others[peer].apart]
            # The last survivor of its state looks for company among all.
            company = any(self._others[peer].mate for peer in alike)
            row = [self.peer, *(alike if company else near)]
            if self.places and len(row) > self._group_size:
                key = str(self._made.epoch // TURN_EPOCHS)
                self._plans[round] = [seats(self._there(row), self.holders, key, self._group_size)]
            else:
                self._plans[round] = plan(row, round, self._group_size)
        return self._plans[round]

    def group(self, peer: str, round: int) -> tuple[str, ...]:
        """The planned group of a peer; an unknown peer is a group of its own."""
        return next((group for group in self.plan(round) if peer in group), (peer,))

    def expected(self, round: int, now: float, misses: float = MISSES) -> set[str]:
        """Members of this peer's planned group that are worth waiting for: with fewer `misses` in a row."""
        group = self.group(self.peer, round)
        return {peer for peer in group if self.alive(peer, now) and self._may_come(peer, round, misses)}

    def coordinator(self, peer: str, round: int, now: float, *, anywhere: bool = False) -> str | None:
        """Return a group's coordinator: the first live, dialable peer, in an order that changes from round to round.

        Args:
            peer: The peer whose group it is.
            round: The round's number.
            now: The time.
            anywhere: Take the first peer of the whole run. There the peers meet whose own groups did not form.

        Returns:
            A PeerID, maybe this peer's or `peer` itself; a shunned peer's only if there is no other; None if no live
            peer can be dialled.
        """
        group = self.group(peer, round)
        everyone = tuple(member for each in self.plan(round) for member in each)
        # All that hold a state know alike who made it, whatever they know of peers that come and go.
        if self.crowded and (held := self._first(round, tuple(sorted(self.holders)), now)):
            return held
        alone = not any(self.alive(member, now) for member in group if member != peer)
        if not anywhere and not alone and (coordinator := self._first(round, group, now)):
            return coordinator
        # A peer without a live mate that can be dialled becomes a guest of another group, which may have room.
        guest = self._first(round, everyone, now, barred=None if anywhere else peer)
        return guest or self._first(round, group, now)

    def dialable_others(self, peers: Iterable[str], now: float) -> list[str]:
        """The `peers` that are alive and can be dialled, without this one."""
        return [peer for peer in peers if peer != self.peer and self._able(peer, now)]

    def mate_ready(self, round: int, now: float, but: str | None = None) -> bool:
        """True if another live member of this peer's planned group says that it is ready; `but` is left out."""
        mates = (mate for mate in self.group(self.peer, round) if mate not in (self.peer, but))
        return any(self.alive(mate, now) and self._others[mate].ready for mate in mates)

    def believed_round(self, now: float) -> int | None:
        """The median of the rounds that answering peers say they are in; None if no peer answers.

        If this peer has shared a round with others, only those count, and of an even number the lower median: they were
        in this peer's round. A newcomer takes the upper median, because a peer that has just restarted, as the newcomer
        has, says 0.
        """
        mates = [other.round for other in self._others.values() if other.mate]
        if mates:  # Even silent ones: a short silence of the mates is no reason to believe strangers.
            return statistics.median_low(mates)
        there = [self._others[peer].round for peer in self.others(now) if self._others[peer].answers]
        return statistics.median_high(there) if there else None

    @property
    def has_mates(self) -> bool:
        """True if the directory still knows a peer that this peer has shared a round with, in one state."""
        return any(other.mate for other in self._others.values())

    def mates_near(self, round: int) -> list[int]:
        """The rounds, at most `LEAP` from this one, of the answering peers that this peer has shared a round with."""
        mates = (other.round for other in self._others.values() if other.mate and other.answers)
        return [mate for mate in mates if abs(mate - round) <= LEAP]

    def highest_round(self, limit: int, now: float) -> int | None:
        """The highest round up to `limit` of any live peer; None if there is no such round."""
        rounds = (self._others[peer].round for peer in self.others(now))
        return max((round for round in rounds if round <= limit), default=None)

    def outrun(self, round: int, limit: int, now: float) -> int:
        """The round, up to `limit`, to which to follow live mates if one in the planned group of `round` is beyond it.

        Two mates at least have had each round, so this peer follows to the second highest of theirs. Without such a
        mate it stays at `round`.
        """
        mates = {peer: self._others[peer].round for peer in self.others(now) if self._others[peer].mate}
        beyond = {peer: theirs for peer, theirs in mates.items() if round < theirs <= limit}
        planned = self.group(self.peer, round)
        return sorted([round, *beyond.values()])[-2] if any(peer in beyond for peer in planned) else round

    def _is_met(self, other: _Other) -> bool:
        return other.met or self._out_of_reach(other)

    def _out_of_reach(self, other: _Other) -> bool:
        """True if neither peer can dial the other, so that neither can ask: then the record has to do."""
        return self._own is not None and not (self._own.dialable or other.dialable or other.met)

    def _able(self, peer: str, now: float) -> bool:
        if peer == self.peer:
            return self.dialable
        return self.alive(peer, now) and self._others[peer].dialable

    def _first(self, round: int, pool: tuple[str, ...], now: float, barred: str | None = None) -> str | None:
        shunned = None
        for peer in ranked(str(round), pool):
            if peer != barred and self._able(peer, now):
                if not self.shuns(peer, now):
                    return peer
                shunned = shunned or peer
        return shunned

    def _may_come(self, peer: str, round: int, misses: float) -> bool:
        if peer == self.peer:
            return self.own_misses < misses
        other = self._others[peer]
        return other.misses < misses and other.round <= round

    def _change(self, now: float) -> None:
        """Note that the set of peers that were met has changed."""
        self._plans.clear()
        self.changed_at = now
