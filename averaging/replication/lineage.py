"""The id of a state follows from the id before and the mean that was applied.

A lineage is a digest over all applied means, so peers with equal ids hold equal states.
"""

from __future__ import annotations

from blake3 import blake3

from equipoise.averaging.state import StateId

CHECK_EVERY = 64
"""Epochs between two checks of the parameters themselves: to hash them takes as long as a step of a small model."""


def beginning(digest: str) -> StateId:
    """The id of an untrained state whose parameters have this digest."""
    return StateId(0, follow("", f"parameters {digest}"))


def follow(lineage: str, what: str) -> str:
    """The lineage after `what` was applied: BLAKE3 in hex."""
    return blake3(f"{lineage}\0{what}".encode()).hexdigest()


def after(before: StateId, digest: str) -> StateId:
    """The state after the mean with this digest, applied to the state `before`, without a check of the parameters."""
    return StateId(before.epoch + 1, follow(before.lineage, f"mean {digest}"))


def is_checked(epoch: int) -> bool:
    """Return whether the id of a state of this epoch includes the parameters themselves."""
    return epoch % CHECK_EVERY == 0


def told(state: StateId) -> str:
    """The name of a state in reasons."""
    return f"epoch {state.epoch} ({state.lineage[:8]})"
