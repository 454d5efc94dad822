"""The closing of a group: the coordinator's policy of when, and of which peers to wait for, for each kind of run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from equipoise.averaging.counts import count
from equipoise.averaging.draw import Drawn, draw
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.group_builder import (
    FACTOR,
    FEW,
    UNSETTLED_SECONDS,
    Closing,
    GroupBuilder,
    Limit,
)
from equipoise.averaging.matchmaking.membership import MISSES
from equipoise.averaging.state import StateId
from equipoise.averaging.strategy import AllReduce, Federated
from equipoise.averaging.timing import (
    HOLD_SECONDS,
    INITIAL_WAIT,
    KEEPALIVE,
    MAX_WAIT,
    MIN_WAIT,
    PATIENT_KEEPALIVE,
    REDRAWN_SECONDS,
)
from equipoise.averaging.weights import contributing
from equipoise.limits import LruDict

MAX_NAMED = 3
"""Most peers that a reason names, so that it fits on a line."""

MAX_DRAWS = 8
"""Most states whose draw is remembered, with the time at which each peer was drawn."""


def named(peers: Sequence[str]) -> str:
    """Name the first peers, and tell how many more there are."""
    more = f" and {len(peers) - MAX_NAMED} more" if len(peers) > MAX_NAMED else ""
    return ", ".join(peers[:MAX_NAMED]) + more


MAX_IN_VAIN = 256
"""Most peers remembered that were drawn in vain."""

MAX_BARRED = 256
"""Most states for which a peer loses its place: one, which a mean ends, then 16 times as many after each further failed
round or two means to which it gives nothing."""


MAX_LATE, LATE_ROUNDS = 256, 16
"""Most peers whose lateness is remembered, and most rounds of each: few, as the median should follow a change."""

MAX_SHARE = 0.25
"""Most that a group waits for a late peer, as a share of the time since the last group closed. A longer wait would cost
the other members more than the late peer gains."""

SPREADS = 4.0
"""Median distances from its usual lateness by which a peer is waited for longer: all but one of 150, were it normal."""


class _Draw(NamedTuple):
    """The draw for a state among `able` peers, and since when each is drawn, or was before another displaced it."""

    drawn: Drawn
    since: dict[str, float]
    able: frozenset[str] = frozenset()


class _InVain(NamedTuple):
    """The rounds in a row for which a peer was drawn and gave nothing, and the first epoch that may draw it again.

    A failed round counts twice: a peer may be a little later than a mean once and again.
    """

    times: int = 0
    until: int = 0


class ClosePolicy:
    """Decides when a coordinator closes its groups: here when waiting longer does not pay, by how late peers were.

    Attributes:
        keepalive: Seconds between a coordinator's messages to a parked peer.
        hold: Most seconds that one coordinator may cost a search once a group is possible.
        patient: Whether peers wait for minutes for others that compute. Such a wait shows no fault of the coordinator.
        reserve: Seconds of a search's patience that its trainer keeps for the exchange.
    """

    keepalive = KEEPALIVE
    hold = HOLD_SECONDS
    patient = False
    reserve = 0.0

    def __init__(self, context: Context) -> None:
        self._context = context

    def awaited(self, builder: GroupBuilder, now: float) -> tuple[Set[str], Set[str]]:
        """The peers that the group is for, and those of them that the coordinator still waits for."""
        expected = self._context.membership.expected(builder.round, now)
        return expected, expected - builder.parked.keys()

    def limit(self, builder: GroupBuilder, now: float) -> Limit:
        """The time at which the group closes without the missing peers, if it can be a group."""
        learnt, patience = self._context.straggler_wait, builder.out_of_patience()
        waited = float("inf") if builder.opened is None else builder.opened + learnt.wait
        why = f"waited {learnt.reason}" if waited <= patience else "half of them have spent half their time"
        return Limit(min(waited, patience), why, waited)

    def draw(self, state: StateId | None, now: float) -> Drawn:
        """The peers that train from a state, here all with a place, and the live ones, as far as this peer sees."""
        membership = self._context.membership
        live = membership.live(())
        return Drawn(membership.seated(self._context.round) if membership.crowded else live, live)

    def late(self, builder: GroupBuilder, closing: Closing, now: float) -> dict[str, float]:
        """Seconds from the quorum to each join, for absent peers a guess; empty where nobody learns from it."""
        return {}

    def learn(self, late: Mapping[str, float], absent: Collection[str], now: float) -> None:
        """Take from a group that has just closed how late its members and the absent peers were; see `late`.

        Members that only attend count as absent.
        """

    def ended(self, standing: wire.Standing, failed: bool) -> None:
        """Note how a round stood when it failed or had its mean."""

    def believes(self, standing: wire.Standing) -> bool:
        """True if the draw of a coordinator's word counts here."""
        return True

    def holds(self, builder: GroupBuilder, now: float) -> bool:
        """True if the group must not close now, with any number of joins."""
        return False

    def standing(self, builder: GroupBuilder, now: float) -> wire.Standing | None:
        """The coordinator's word to the parked peers about the round; None if it says numbers only."""
        return None

    def describe(self, builder: GroupBuilder, expected: Set[str]) -> str:
        """Describe the parked joins, and what the group waits for, in one line."""
        missing = sorted(expected - builder.parked.keys())
        in_all = len(expected | builder.parked.keys())
        told = f"this peer coordinates: {len(builder.parked)} of {in_all} in"
        if lacks := self._lacks(builder):
            return f"{told}; {lacks}"
        if in_all == 1:
            return "nobody is left" if self._context.next_round.floor else "nobody else is in this run"
        waits = f"waits for {named(missing)}, " if missing else "waits "
        return f"{told}; {waits}for {self._wait(builder, missing)[1]}"

    def _wait(self, builder: GroupBuilder, missing: Sequence[str]) -> tuple[float, str]:
        """Seconds for which to wait for missing peers, and the reason for that, one line."""
        learnt = self._context.straggler_wait
        return learnt.wait, learnt.reason

    def _lacks(self, builder: GroupBuilder) -> str:
        """The contributors that the parked peers lack, one line; empty if they are enough, or this peer is alone."""
        needs, weights = self._context.needs, [parked.join.weight for parked in builder.parked.values()]
        contributors = contributing(weights, needs.least).bit_count()
        if len(weights) < 2 or contributors >= needs.quorum:
            return ""
        needed = f"{needs.quorum} contributors are needed"
        if not any(weights):
            return f"all observe: {needed}, and all weights are 0"
        return f"{needed}, {contributors} of {len(weights)} have a weight above 0"


class Grace(ClosePolicy):
    """All-reduce with a grace: a group closes when all live peers are in, or some seconds after its quorum is.

    Unless they are given, they follow from how late each missing peer has been: its median lateness and some spreads.
    A peer that is mostly later than `MAX_WAIT`, or than `MAX_SHARE` of the time between two groups, is not waited for:
    its contribution is late, and may count in the next round. A peer that was absent counts as twice as late as the
    group waited, so a longer wait is tried next time.
    """

    def __init__(self, context: Context, strategy: AllReduce) -> None:
        super().__init__(context)
        self._quorum = strategy.quorum
        self._given = strategy.grace if isinstance(strategy.grace, float) else None
        self.hold = HOLD_SECONDS + (self._given or 0.0)
        self._late: LruDict[str, deque[float]] = LruDict(MAX_LATE)
        self._closed_at = float("-inf")

    def awaited(self, builder: GroupBuilder, now: float) -> tuple[Set[str], Set[str]]:
        """See `ClosePolicy.awaited`. A peer that is mostly late stays expected: that shows when it is late no more."""
        misses = float("inf") if self._given is None else MISSES
        expected = self._context.membership.expected(builder.round, now, misses)
        if builder.round >= self._context.round + MISSES:
            # Rounds have gone by without this peer's own script.
            expected.discard(self._context.peer)
        return expected, expected - builder.parked.keys()

    def limit(self, builder: GroupBuilder, now: float) -> Limit:
        """See `ClosePolicy.limit`. Where some of the quorum only attend, the wait is that of other all-reduce runs."""
        reached = builder.quorum_at(self._quorum)
        if reached == float("inf"):
            return super().limit(builder, now)
        grace, why = self._wait(builder, sorted(self.awaited(builder, now)[1]))
        patience = builder.out_of_patience()
        why = f"waited {why}" if reached + grace <= patience else "half of them have spent half their time"
        return Limit(min(reached + grace, patience), why)

    def late(self, builder: GroupBuilder, closing: Closing, now: float) -> dict[str, float]:
        """See `ClosePolicy.late`."""
        reached = builder.quorum_at(self._quorum)
        if self._given is not None or reached > now:
            return {}
        arrivals = {join.peer: builder.parked[join.peer].arrived for join in closing.members}
        guesses = dict.fromkeys(closing.absent, reached + FACTOR * (now - reached))
        return {peer: min(max(at - reached, 0.0), MAX_WAIT) for peer, at in (arrivals | guesses).items()}

    def learn(self, late: Mapping[str, float], absent: Collection[str], now: float) -> None:
        """See `ClosePolicy.learn`."""
        self._closed_at = now
        for peer, seconds in late.items():
            seen = self._late.setdefault(peer, deque(maxlen=LATE_ROUNDS))
            # A group that has not waited for a peer, or that it only attends, shows nothing of how late it is.
            seen.append(max(seconds, self._usual(seen)) if peer in absent else seconds)

    def _wait(self, builder: GroupBuilder, missing: Sequence[str]) -> tuple[float, str]:
        after = f"after the quorum of {self._quorum}"
        if self._given is not None:
            return self._given, f"{self._given:g} s {after}"
        share = MAX_SHARE * (builder.quorum_at(self._quorum) - self._closed_at)
        most = min(max(share, MIN_WAIT), MAX_WAIT)
        wait, why = max((self._wait_for(peer, most) for peer in missing), default=(0.0, "nobody is missing"))
        return wait, f"{wait:.1f} s {after}: {why}"

    def _wait_for(self, peer: str, most: float) -> tuple[float, str]:
        """Seconds after the quorum for which to wait for a peer, at most `most`, and the reason."""
        seen = self._late.get(peer, deque())
        usual = self._usual(seen)
        if usual >= most:
            return 0.0, f"{peer} is mostly over {most:.3g} s late"
        spread = statistics.median_high(abs(one - usual) for one in seen) if seen else 0.0
        least = MIN_WAIT if len(seen) >= FEW else INITIAL_WAIT
        told = f"{peer} was {usual:.1f} s late in {count(len(seen), 'round')}, give or take {spread:.1f} s"
        return min(max(usual + SPREADS * spread, least), most), told

    @staticmethod
    def _usual(seen: deque[float]) -> float:
        return statistics.median_high(seen) if seen else 0.0


class QuorumAndGrace(ClosePolicy):
    """Federated rounds: a round closes when all drawn peers are in, or some seconds after its quorum is.

    A round of peers that only attend introduces newcomers to each other, and changes nothing: it closes as any group
    does.

    The draw takes peers that were there before the state was, since the lineage of a state says which PeerIDs come
    first, and takes none that was drawn and gave nothing: to a
    failed round, or to two rounds in a row. Others only make up the least number.
    """

    keepalive = PATIENT_KEEPALIVE
    patient = True

    def __init__(self, context: Context, strategy: Federated) -> None:
        super().__init__(context)
        self.hold, self.reserve = strategy.grace + HOLD_SECONDS, strategy.reserve
        self._strategy = strategy
        self._draws: LruDict[StateId | None, _Draw] = LruDict(MAX_DRAWS)
        self._apart: LruDict[StateId | None, frozenset[str]] = LruDict(MAX_DRAWS)
        self._older: LruDict[StateId | None, frozenset[str]] = LruDict(MAX_DRAWS)
        self._in_vain: LruDict[str, _InVain] = LruDict(MAX_IN_VAIN)
        self._begun = False

    def awaited(self, builder: GroupBuilder, now: float) -> tuple[Set[str], Set[str]]:
        """See `ClosePolicy.awaited`."""
        if builder.introduces:
            return super().awaited(builder, now)
        state = builder.state
        self._apart[state] = self._apart_from(builder, now)
        self.draw(state, now)
        since = self._draws[state].since
        missing = {peer for peer, at in since.items() if not self._is_in(builder, peer, at, now)}
        return since.keys(), missing

    def limit(self, builder: GroupBuilder, now: float) -> Limit:
        """See `ClosePolicy.limit`."""
        if builder.introduces:
            return super().limit(builder, now)
        quorum, grace = self._strategy.quorum, self._strategy.grace
        told = f"{len(builder.contributors)} are in, {grace:g} s after the quorum of {quorum}"
        return Limit(builder.quorum_at(quorum) + grace, told)

    def draw(self, state: StateId | None, now: float) -> Drawn:
        """See `ClosePolicy.draw`."""
        strategy, live = self._strategy, self._context.membership.live(self._strategy.tags)
        self._begun = self._begun or len(live) >= strategy.available
        # Two rounds from one state may both have come about: the others train in place of those of the smaller side.
        live = tuple(peer for peer in live if peer not in self._apart.get(state, frozenset()))
        drawn, since, before = self._draws.get(state, _Draw(Drawn((), ()), {}))
        able = self._able(live, state)
        if live != drawn.live or able != before:
            # Fewer than the quorum could only fail. Where peers die or lose their places, others take these.
            least, share = max(strategy.minimum, strategy.quorum), int(len(live) * strategy.fraction)
            seed = "" if state is None else state.lineage
            peers = draw(able, seed, fraction=0, minimum=max(least, share, len(drawn.peers)))
            peers += draw(
                able.symmetric_difference(live), seed, fraction=0, minimum=max(least - len(peers), 0)
            )
            drawn = Drawn(peers[: self._context.needs.group_size], live)
            # A peer that a newcomer has displaced may be training: the round still waits for it.
            stay = dict.fromkeys((*drawn.peers, *(peer for peer in since if peer in able)))
            since = {peer: since.get(peer, now) for peer in stay}
        self._draws[state] = _Draw(drawn, since, able)
        return drawn

    def ended(self, standing: wire.Standing, failed: bool) -> None:
        """See `ClosePolicy.ended`: the coordinator's word to all, or the mean, counts, so all draw alike."""
        epoch, deeds = 0 if standing.state is None else standing.state.epoch, self._context.deeds
        for peer in self._in_vain.keys() & set(standing.contributed):
            del self._in_vain[peer]
            deeds.absolve(peer)
        for peer in set(standing.drawn).difference(standing.contributed):
            times, until = self._in_vain.get(peer, _InVain())
            if epoch >= until:
                times += 1 + failed
                self._in_vain[peer] = _InVain(times, epoch + min(16 ** ((times - 1) // 2), MAX_BARRED))
                if times > 2 and peer != self._context.peer:  # Its daemon heard of none of these rounds.
                    deeds.blame(peer, "it was drawn for rounds in a row, and gave nothing")

    def believes(self, standing: wire.Standing) -> bool:
        """See `ClosePolicy.believes`: this peer rejects a draw that ignores a failed round."""
        return standing.state is None or not any(
            self._is_barred(peer, standing.state) for peer in standing.drawn
        )

    def _able(self, live: tuple[str, ...], state: StateId | None) -> frozenset[str]:
        """The live peers that may be drawn from a state; to a peer that came with the state all others are older."""
        if state not in self._older:
            saw_another = any(one and state and one.epoch < state.epoch for one in self._older)
            self._older[state] = frozenset(live if saw_another else ())
        older = self._older[state] or live
        return frozenset(peer for peer in live if peer in older and not self._is_barred(peer, state))

    def _is_barred(self, peer: str, state: StateId | None) -> bool:
        return state is not None and state.epoch < self._in_vain.get(peer, _InVain()).until

    def holds(self, builder: GroupBuilder, now: float) -> bool:
        """See `ClosePolicy.holds`: late peers form no round of their own for a state that the others have left.

        Nor does the first round close before this peer, too, has seen as many as are to be there.
        """
        state = builder.state
        if not self._begun and not builder.introduces and state is not None and state.epoch == 0:
            there = {*self._context.membership.live(self._strategy.tags), *builder.parked}
            if len(there) < self._strategy.available:
                return True
        believed = self._context.membership.believed_round(now)
        return believed is not None and believed > builder.round

    def standing(self, builder: GroupBuilder, now: float) -> wire.Standing | None:
        """See `ClosePolicy.standing`."""
        state = builder.state
        self._apart[state] = self._apart_from(builder, now)
        return wire.Standing(state, self.draw(state, now).peers, builder.contributors)

    def describe(self, builder: GroupBuilder, expected: Set[str]) -> str:
        """See `ClosePolicy.describe`."""
        counted = f"{count(len(builder.contributors), 'contribution')} in, {self._strategy.quorum} needed"
        told = f"{counted}, {len(expected)} drawn, {len(builder.parked)} here"
        return "; ".join(filter(None, (told, self._lacks(builder))))

    def _apart_from(self, builder: GroupBuilder, now: float) -> frozenset[str]:
        """The peers that cannot contribute. After `UNSETTLED_SECONDS`, peers beyond the group or its round count too:
        all have asked them for the means between, and none keeps these."""
        settled = builder.opened is not None and now >= builder.opened + UNSETTLED_SECONDS
        beyond = self._context.membership.beyond(builder.round) if settled else frozenset()
        return builder.apart(settled) | beyond

    def _is_in(self, builder: GroupBuilder, peer: str, since: float, now: float) -> bool:
        """True if the peer contributes, or observes though it knew that it was drawn."""
        parked = builder.parked.get(peer)
        if parked is None:
            return False
        knew = parked.arrived >= since or now >= since + REDRAWN_SECONDS
        return peer in builder.contributors or knew
