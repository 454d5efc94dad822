"""`FetchOutcome` and `MeanOutcome`: what a download came to, as values."""

from __future__ import annotations

import msgspec

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId


class FetchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a download came to.

    Attributes:
        ok: Whether the memory now holds the image, every byte of it proved.
        reason: Why it ended so, in one line.
        state: What the image is a snapshot of; None if not ok.
        size: Bytes of the image.
        sources: PeerID -> bytes that came from it.
        seconds: From the first question to the last byte.
        behind: Of a mean that is not to be had: how many peers are not as far as this one.
        unheard: Of one: how many peers have not said whether they have it.
    """

    ok: bool
    reason: str
    state: StateId | None = None
    size: int = 0
    sources: dict[str, int] = {}
    seconds: float = 0.0
    behind: int = 0
    unheard: int = 0


class MeanOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What it came to to look for a mean that was missed.

    Attributes:
        round: What the round came to, as those see it who did not miss it; not ok if its mean is not to be had.
        sources: PeerID -> bytes that came from it.
        behind: If not ok: how many peers are not as far as this one.
        unheard: If not ok: how many have not said whether they have it: a round may still be going on there.
    """

    round: Outcome
    sources: dict[str, int] = {}
    behind: int = 0
    unheard: int = 0
