"""The search of a peer in a federated run, where others train for minutes while its join is parked.

It has the states and steps of `Joiner`. That a join has no group yet is no sign here that views differ, so the peer
moves to another round or coordinator only by what it sees itself. It keeps its coordinator's word about the round.
"""

from __future__ import annotations

from typing import NamedTuple

from equipoise.averaging.counts import count
from equipoise.averaging.draw import Drawn
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.closing import ClosePolicy, named
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.coordinator import Coordinator
from equipoise.averaging.matchmaking.events import BecameReady
from equipoise.averaging.matchmaking.joiner import NEVER, Coordinating, Joiner, Search
from equipoise.averaging.outcome import Gathering
from equipoise.averaging.state import StateId

VAIN = 0.25
"""Share of its time for a group after which a patient search that ends without one counts as vain: the others may be in
another round. A search that ends sooner may have been withdrawn for a training."""


SPENT = 0.95
"""Share of its time for a group after which a search that is given up had all of it: clocks differ a little."""


class _Word(NamedTuple):
    """The word of a round's coordinator: its standing, and when it closes."""

    standing: wire.Standing | None = None
    closes_at: float = NEVER


class PatientJoiner(Joiner):
    """One peer's search for a group of a federated run; then for the next group."""

    def __init__(self, context: Context, coordinator: Coordinator, policy: ClosePolicy) -> None:
        super().__init__(context, coordinator, policy)
        self._word = _Word()
        self._in_vain = False

    def begin(self, ready: BecameReady, now: float) -> None:
        """See `Joiner.begin`."""
        super().begin(ready, now)
        self._in_vain = False

    def settle(self, now: float) -> None:
        """See `Joiner.settle`."""
        if self.search is not None:
            self._in_vain = now >= self.search.since + VAIN * self._patience(self.search)
        super().settle(now)

    def invited(self, peer: str, message: wire.Invitation, now: float) -> None:
        """See `Joiner.invited`."""
        if self.search is not None:
            super().invited(peer, message, now)
        elif message.round >= self._round.number and self._membership.knows(peer):
            self._hear(message, now)

    def alone(self, now: float) -> None:
        """See `Joiner.alone`: without a group for now, because the others train."""

    def end(self, formed_by: str | None = None) -> None:
        """See `Joiner.end`."""
        super().end(formed_by)
        self._word, self._in_vain = _Word(), self._in_vain and formed_by is None

    # ---- for people ----

    def gathering(self, now: float) -> Gathering | None:
        """See `Joiner.gathering`. The coordinator of a round tells it also to the peers that still train."""
        standing, closes_in = self._view(now)
        if standing is None:
            return super().gathering(now)
        search = self.search
        gives_up = None if search is None else search.since + self._patience(search) - now
        return federated(standing, self._context.needs.quorum, closes_in, gives_up)

    def shortage(self, now: float) -> str:
        """See `Joiner.shortage`."""
        standing, _ = self._view(now)
        if standing is None:
            return ""
        missing = [peer for peer in standing.drawn if peer not in standing.contributed]
        lacks = f"; drawn, and not in: {named(missing)}" if missing else ""
        if self.search is not None and not self.search.stated.join.weight:
            lacks += "; this peer observes, with weight 0"
        needed = f"{self._context.needs.quorum} needed{lacks}"
        return f"{count(len(standing.contributed), 'contribution')} in, {needed}"

    def draw(self, state: StateId, now: float) -> Drawn:
        """See `Joiner.draw`. The coordinator's word counts, where this peer's join is parked."""
        drawn, (standing, _) = super().draw(state, now), self._view(now)
        if self.search is None or standing is None or standing.state != state:
            return drawn
        return Drawn(standing.drawn, drawn.live) if self._policy.believes(standing) else drawn

    def gives_up(self, now: float) -> None:
        """See `Joiner.gives_up`. A search that had its whole time was for a round that failed."""
        standing, _ = self._view(now)
        if self.search and standing and now >= self.search.since + SPENT * self._patience(self.search):
            self._policy.ended(standing, failed=True)

    def _view(self, now: float) -> tuple[wire.Standing | None, float | None]:
        """The standing of the round, and the seconds until it closes; this peer may coordinate while it trains."""
        own = self._coordinator.standing(self._round.number, now)
        if isinstance(self.state, Coordinating) or (self.state.coordinator is None and own[0] is not None):
            return own
        standing, closes_at = self._word
        return standing, None if closes_at == NEVER else closes_at - now

    # ---- otherwise than in other runs ----

    def _patience(self, search: Search) -> float:
        """Seconds that a search may take: the trainer keeps the rest for the exchange."""
        return search.stated.patience - self._policy.reserve

    def _choose_round(self, search: Search, now: float) -> None:
        if self._in_vain:
            self._round.follow_highest(now)

    def _follow_others(self, search: Search, now: float) -> float:
        if search.join is None:
            self._round.follow(now, alone=False)
        elif self._is_behind(search, now):
            return self._heed(search, now)
        return 0.0

    def _hear(self, message: wire.JoinAccepted | wire.Invitation, now: float) -> None:
        closes_at = NEVER if message.closes is None else now + message.closes
        self._word = _Word(message.standing or self._word.standing, closes_at)
        if isinstance(message, wire.JoinAccepted) and message.standing is not None:
            # The peers that the coordinator does not draw are asked whether they live.
            drawn = self._policy.draw(message.standing.state, now).peers
            undrawn = set(drawn).difference(message.standing.drawn)
            self._context.ask(self._membership.dialable_others(undrawn, now), now)

    def _ask(self, search: Search, coordinator: str, now: float) -> None:
        super()._ask(search, coordinator, now)
        self._word = _Word()

    def _could_close(self, peer: str, message: wire.JoinAccepted, now: float) -> bool:
        return not message.short

    def _trusts(self, peer: str, now: float) -> bool:
        # Any peer may invite again and again: this peer goes only where its own view sends it.
        return peer == self._membership.coordinator(self._context.peer, self._round.number, now)


def federated(
    standing: wire.Standing, quorum: int, closes_in: float | None, gives_up: float | None = None
) -> Gathering:
    """The state of a federated round that gathers, for people."""
    ready, target = len(standing.contributed), len({*standing.drawn, *standing.contributed})
    lacking = quorum - ready
    if lacking > 0:
        until = "" if gives_up is None or gives_up < 1 else f", {gives_up:.0f} s at most"
        waits = f"waits for {count(lacking, 'more contribution')}{until}"
    else:
        waits = "quorum reached" + (f", closes in {max(closes_in, 0):.0f} s" if closes_in is not None else "")
    return Gathering(ready, target, f"{ready} of {target} in, {waits}", standing.drawn, standing.contributed)
