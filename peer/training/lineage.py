"""The id of a state follows from the id before and the mean that was applied. `Missed` chains the means that a peer has
missed, and tells whether they lead to the group's state.

A lineage is a digest over all applied means. So the digests of a chain of means, from a peer's own state to a state
that the group claims, prove all these means together, from any source. A peer applies none of them before.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from blake3 import blake3

from equipoise.averaging.state import StateId

CHECK_EVERY = 64
"""Epochs between two checks of the parameters themselves: to hash them takes as long as a step of a small model."""

MAX_MISSED = 8
"""Most missed means that a peer fetches, as many as daemons keep; a peer that has missed more takes a snapshot."""


class Link(NamedTuple):
    """A mean: the state before it, and the state after it (without a check of the parameters)."""

    before: StateId
    after: StateId


def beginning(digest: str) -> StateId:
    """The id of an untrained state whose parameters have this digest."""
    return StateId(0, follow("", f"parameters {digest}"))


def follow(lineage: str, what: str) -> str:
    """The lineage after `what` was applied: BLAKE3 in hex."""
    return blake3(f"{lineage}\0{what}".encode()).hexdigest()


def link_of(before: StateId, digest: str) -> Link:
    """The link of the mean with this digest, applied to the state `before`."""
    return Link(before, StateId(before.epoch + 1, follow(before.lineage, f"mean {digest}")))


def is_checked(epoch: int) -> bool:
    """Return whether the id of a state of this epoch includes the parameters themselves."""
    return epoch % CHECK_EVERY == 0


def leads_to(link: Link, state: StateId) -> bool:
    """Return whether a mean leads to a state, as far as this shows without the parameters."""
    if is_checked(state.epoch):
        return link.after.epoch == state.epoch
    return link.after == state


def told(state: StateId) -> str:
    """The name of a state in reasons."""
    return f"epoch {state.epoch} ({state.lineage[:8]})"


class Missed:
    """The chain of missed means that have come so far.

    Attributes:
        links: Means that are here and not applied.
        asked: The state whose next mean is being fetched, if any.
        given_up: The reason why no means after this peer's state can be fetched; empty if they may be.
    """

    def __init__(self) -> None:
        self.links: deque[Link] = deque()
        self.asked: StateId | None = None
        self.given_up = ""

    def next(self, state: StateId, target: StateId | None, most: int = MAX_MISSED) -> StateId | None:
        """The state after which to ask for the next of at most `most` means to `target`; None if means cannot help."""
        end = self.links[-1].after if self.links else state
        if self.given_up or self.asked or target is None or end.epoch >= target.epoch:
            return None
        if not within_reach(state, target, min(most, MAX_MISSED)):
            return None
        self.asked = end
        return end

    def take(self, before: StateId, digest: str) -> bool:
        """Take a mean that has come; returns whether it was asked for."""
        if before != self.asked:
            return False
        self.asked = None
        self.links.append(link_of(before, digest))
        return True

    def clear(self, given_up: str = "") -> list[Link]:
        """Begin anew, or give up; returns the links that were here."""
        links, self.links, self.asked, self.given_up = list(self.links), deque(), None, given_up
        return links


def within_reach(state: StateId, target: StateId, most: int = MAX_MISSED) -> bool:
    """Return whether at most `most` means lead from `state` to `target`, without an id that includes the parameters."""
    epochs = range(state.epoch + 1, target.epoch + 1)
    return 0 < len(epochs) <= most and not any(map(is_checked, epochs))
