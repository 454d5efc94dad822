"""The log of one peer: the means that the group has applied, and this peer has not."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.replication import lineage
from equipoise.averaging.state import StateId

HELD_MEANS = 32
"""Most means kept while a snapshot comes, if memory allows. A snapshot with Adam's two moments has twelve bytes a
value, a round in int8 about two. So on a link that bounds both, a snapshot takes six rounds, and more if the link is
shared."""

MAX_MISSED = 8
"""Most missed means that a peer fetches, as many as daemons keep; a peer that has missed more takes a snapshot."""


class Entry(NamedTuple):
    """One mean.

    Attributes:
        before: The state to which the group applied it.
        outcome: The outcome of its round.
        values: The mean itself, encoded, for the script that applies it; the log never looks at it.
    """

    before: StateId
    outcome: Outcome
    values: object = None

    @property
    def after(self) -> StateId:
        """The state after it, without a check of the parameters."""
        return lineage.after(self.before, self.outcome.digest)

    def leads_to(self, state: StateId) -> bool:
        """Return whether it leads to a state, as far as this shows without the parameters."""
        if lineage.is_checked(state.epoch):
            return self.before.epoch + 1 == state.epoch
        return self.after == state


class Log:
    """At most `most` means of the rounds that this peer attended, and the missed means that lead up to them.

    Attributes:
        held: The means that are believed: from the rounds that this peer attended, or proved to lead up to those.
        missed: The means from this peer's state on that have come so far, and are not proved.
        asked: The state whose next mean is being fetched, if any.
        given_up: The reason why no means after this peer's state can be fetched; empty if they may be.
    """

    def __init__(self, most: int = HELD_MEANS) -> None:
        self.held: deque[Entry] = deque()
        self.missed: list[Entry] = []
        self.asked: StateId | None = None
        self.given_up = ""
        self._most = min(most, HELD_MEANS)

    @property
    def start(self) -> StateId | None:
        """The state from which on this peer holds the means."""
        return self.held[0].before if self.held else None

    def hold(self, entry: Entry) -> None:
        """Hold the mean of a round; it makes what was held before a gap useless."""
        if self.held and not self.held[-1].leads_to(entry.before):
            self.clear()
        if len(self.held) == self._most:
            self.held.popleft()
        self.held.append(entry)

    def pop(self, state: StateId) -> Entry | None:
        """Take the mean to apply to a state, if it is held."""
        return self.held.popleft() if self.start == state else None

    def clear(self) -> None:
        """Forget all means."""
        self.held.clear()
        self.forget()

    def forget(self, given_up: str = "") -> None:
        """Forget the missed means: this peer begins anew, or gives them up."""
        self.missed, self.asked, self.given_up = [], None, given_up

    def skip_to(self, state: StateId) -> None:
        """Forget the means that a snapshot of this state includes, and the missed means before it."""
        while self.held and self.held[0].before.epoch < state.epoch:
            self.held.popleft()
        self.forget()

    def next(self, state: StateId, target: StateId | None) -> StateId | None:
        """The state after which to ask for the next mean on the way from `state` to `target`; None if none can help."""
        end = self.missed[-1].after if self.missed else state
        if self.given_up or self.asked or target is None or end.epoch >= target.epoch:
            return None
        most = min(self._most - len(self.held) + 1, MAX_MISSED)
        if within_reach(state, target, most):
            self.asked = end
        return self.asked

    def take(self, entry: Entry) -> bool:
        """Take a mean that has come; returns whether it was asked for."""
        if entry.before != self.asked:
            return False
        self.asked = None
        self.missed.append(entry)
        return True

    def believe(self) -> None:
        """Hold the missed means too: they are proved, or vouched for."""
        self.held.extendleft(reversed(self.missed))
        self.forget()


def within_reach(state: StateId, target: StateId, most: int = MAX_MISSED) -> bool:
    """Return whether at most `most` means lead from `state` to `target`, without an id that includes the parameters."""
    epochs = range(state.epoch + 1, target.epoch + 1)
    return 0 < len(epochs) <= most and not any(map(lineage.is_checked, epochs))
