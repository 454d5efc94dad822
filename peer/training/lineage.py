"""The id of a state follows from the one before and the mean that was applied to it. `Missed` chains the means that a
peer has missed, one after another, and tells whether they lead to the group's state.

A lineage is a digest over all that was applied. So the digests of a chain of means, from a peer's own state to one that
the group claims, prove all of them together, from any source; no mean is applied before.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from blake3 import blake3

from equipoise.averaging.state import StateId

CHECK_EVERY = 64
"""Epochs between two looks at the parameters themselves: to hash them takes as long as a step of a small model."""

MAX_MISSED = 8
"""Most means that are asked for, as many as daemons keep; a peer that has missed more takes a snapshot."""


class Link(NamedTuple):
    """A mean: the state before it and, but for a check of the parameters, the state after it."""

    before: StateId
    after: StateId


def beginning(digest: str) -> StateId:
    """The id of a state nobody has trained yet, whose parameters have this digest."""
    return StateId(0, follow("", f"parameters {digest}"))


def follow(lineage: str, what: str) -> str:
    """The lineage after `what` was applied: BLAKE3 in hex."""
    return blake3(f"{lineage}\0{what}".encode()).hexdigest()


def link_of(before: StateId, digest: str) -> Link:
    """The link by which the mean with this digest leads on from a state."""
    return Link(before, StateId(before.epoch + 1, follow(before.lineage, f"mean {digest}")))


def is_checked(epoch: int) -> bool:
    """Return whether the id of a state of this epoch takes in the parameters themselves."""
    return epoch % CHECK_EVERY == 0


def leads_to(link: Link, state: StateId) -> bool:
    """Return whether a mean leads to a state, as far as that can be told without the parameters."""
    if is_checked(state.epoch):
        return link.after.epoch == state.epoch
    return link.after == state


def told(state: StateId) -> str:
    """The state's name in reasons."""
    return f"epoch {state.epoch} ({state.lineage[:8]})"


class Missed:
    """The chain, as far as it has come.

    Attributes:
        links: Means that are here and not applied.
        asked: The state whose next mean is being fetched, if any.
        given_up: The reason why no more are to be had after this peer's state; empty if they may be.
    """

    def __init__(self) -> None:
        self.links: deque[Link] = deque()
        self.asked: StateId | None = None
        self.given_up = ""

    def next(self, state: StateId, target: StateId | None, most: int = MAX_MISSED) -> StateId | None:
        """The state after which to ask for a mean on the way to `target`, of at most `most`; None if there is none."""
        end = self.links[-1].after if self.links else state
        if self.given_up or self.asked or target is None or end.epoch >= target.epoch:
            return None
        if not within_reach(state, target, min(most, MAX_MISSED)):
            return None
        self.asked = end
        return end

    def ask(self, state: StateId) -> bool:
        """Return whether to ask for the mean after `state`, wherever it leads: from now on it is being fetched."""
        if self.asked is not None:
            return False
        self.asked = state
        return True

    def take(self, before: StateId, digest: str) -> bool:
        """A mean has come; returns whether it is the one that was asked for."""
        if before != self.asked:
            return False
        self.asked = None
        self.links.append(link_of(before, digest))
        return True

    def completes(self, target: StateId) -> bool:
        """Return whether the means that are here lead to `target`."""
        return bool(self.links) and leads_to(self.links[-1], target)

    def clear(self, given_up: str = "") -> list[Link]:
        """Begin anew, or give up; returns what was here."""
        links, self.links, self.asked, self.given_up = list(self.links), deque(), None, given_up
        return links


def within_reach(state: StateId, target: StateId, most: int = MAX_MISSED) -> bool:
    """Return whether means may lead there: few, and to no state whose id only its parameters tell."""
    epochs = range(state.epoch + 1, target.epoch + 1)
    return 0 < len(epochs) <= most and not any(map(is_checked, epochs))
