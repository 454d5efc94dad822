"""What a strategy's machine is: it forms the groups of one peer in one run."""

from __future__ import annotations

from abc import ABC, abstractmethod

from equipoise.averaging.manifest import Manifest
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.events import Action, Event
from equipoise.averaging.outcome import RunState


class Matchmaker(ABC):
    """Forms this peer's groups; reads no clock. Times are seconds of one monotonic clock.

    It is told events and returns what to do. `deadline` says by when it must be told `Woke`.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._exchanging: Manifest | None = None
        self._deadline = float("-inf")
        self._reason = "the run has just been joined"

    @property
    def deadline(self) -> float:
        """When `Woke` is due; at once after construction."""
        return self._deadline

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether a group is sought for this peer."""

    @property
    @abstractmethod
    def state(self) -> RunState:
        """Where the next round stands."""

    @property
    def round(self) -> int:
        """Number of this peer's next round."""
        return self._context.round

    @property
    def others(self) -> int:
        """How many other peers of the run answer."""
        return self._context.membership.count

    @property
    def reason(self) -> str:
        """Why it stands where it does, one line."""
        return self._reason

    def answers(self, peer: str) -> bool:
        """Whether another peer has answered this one, and has not been lost since."""
        return self._context.membership.answers(peer)

    def is_mute(self, peer: str) -> bool:
        """Whether another peer could not be reached, or did not answer, and has never said anything."""
        return self._context.membership.is_mute(peer)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in what has happened, and say what to do.

        Raises:
            ValueError: The caller's mistake: `BecameReady` while ready, or with a weight or nonce that is not valid.
        """
        self._take(event, now)
        self._settle(now)
        actions, self._context.out = self._context.out, []
        return actions

    @abstractmethod
    def _take(self, event: Event, now: float) -> None: ...

    @abstractmethod
    def _settle(self, now: float) -> None: ...
