"""The machine of a strategy: it forms the groups of one peer in one run."""

from __future__ import annotations

from abc import ABC, abstractmethod

from equipoise.averaging.draw import Drawn
from equipoise.averaging.manifest import Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.messages import Whereabouts
from equipoise.averaging.outcome import Exchanging, Gathering, Idle, NoPeers, RunState
from equipoise.averaging.state import StateId


class Matchmaker(ABC):
    """Forms this peer's groups; takes events and returns actions. Times are seconds of one monotonic clock.

    Attributes:
        context: The peer in its run.
        deadline: When `Woke` is due; at once after construction.
        reason: Reason for this peer's state, one line.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._membership = context.membership
        self._exchanging: Manifest | None = None
        self.deadline = float("-inf")
        self.reason = "the run has just been joined"

    @property
    @abstractmethod
    def ready(self) -> bool:
        """True while this peer seeks a group."""

    @property
    def state(self) -> RunState:
        """The state of the next round."""
        membership = self._membership
        if self._exchanging is not None:
            return Exchanging(len(self._exchanging.members), self._exchanging.round)
        if not membership.count:
            return NoPeers(membership.why_nobody)
        return (self.ready and self.gathering) or Idle(membership.count)

    @property
    @abstractmethod
    def gathering(self) -> Gathering | None:
        """The next round while it gathers, as far as this peer knows; None if it knows nothing of it."""

    @property
    def round(self) -> int:
        """Number of this peer's next round."""
        return self.context.round

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Take in an event; return the actions, in order.

        Raises:
            ValueError: The caller's mistake: `BecameReady` with a weight that is not valid.
        """
        context = self.context
        context.deeds.now = now
        match event:
            case events.RoundEnded(faults=faults):
                for peer, why in faults.items():
                    context.deeds.blame(peer, why)
            case events.CandidatesSeen(candidates):
                self._membership.see(candidates, now)
                context.ask(self._membership.to_ask(now), now)
            case events.MessageReceived(peer, message):
                self._membership.hear(peer, now)
                if isinstance(message, Whereabouts) and message.asks:
                    context.send(peer, context.whereabouts())
            case events.RoundHeard(peer):
                self._membership.hear(peer, now)
            case events.PeerLost(peer):
                self._membership.lose(peer, now)
                self._membership.note_gone(peer)
            case events.MeanHeld(outcome):
                self.context.note_mean(outcome, now)
        self._take(event, now)
        self._settle(now)
        actions, context.out = context.out, []
        return actions

    @property
    def shortage(self) -> str:
        """Why no group has formed so far, one line."""
        return self.reason

    def draw(self, state: StateId, now: float) -> Drawn:
        """The peers that are to train from an agreed state, and the live ones: all, but in a federated run."""
        live = self._membership.live(())
        return Drawn(live, live)

    @abstractmethod
    def _take(self, event: events.Event, now: float) -> None: ...

    @abstractmethod
    def _settle(self, now: float) -> None: ...
