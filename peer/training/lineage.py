"""How the id of a state follows from the one before and what was applied to it."""

from __future__ import annotations

from typing import NamedTuple

from blake3 import blake3

from equipoise.averaging.state import StateId

CHECK_EVERY = 64
"""Epochs between two looks at the parameters themselves: hashing them takes about as long as a step of a small
model."""


class Link(NamedTuple):
    """A mean: where it leads from and, but for its last check, where to."""

    before: StateId
    after: StateId


def beginning(digest: str) -> StateId:
    """The id of a state nobody has trained yet, whose parameters have this digest."""
    return StateId(0, follow("", f"parameters {digest}"))


def follow(lineage: str, what: str) -> str:
    """The lineage after `what` was applied: BLAKE3 in hex."""
    return blake3(f"{lineage}\0{what}".encode()).hexdigest()


def link_of(before: StateId, digest: str) -> Link:
    """What the mean with this digest makes of a state."""
    return Link(before, StateId(before.epoch + 1, follow(before.lineage, f"mean {digest}")))


def is_checked(epoch: int) -> bool:
    """Whether the id of a state of this epoch takes in the parameters themselves."""
    return epoch % CHECK_EVERY == 0


def leads_to(link: Link, state: StateId) -> bool:
    """Whether a mean leads to a state, as far as that can be told without the parameters."""
    if is_checked(state.epoch):
        return link.after.epoch == state.epoch
    return link.after == state


def told(state: StateId) -> str:
    """The state as a reason says it."""
    return f"epoch {state.epoch} ({state.lineage[:8]})"
