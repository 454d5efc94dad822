"""`FetchOutcome`: what a download came to, as a value."""

from __future__ import annotations

import msgspec

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
    """

    ok: bool
    reason: str
    state: StateId | None = None
    size: int = 0
    sources: dict[str, int] = {}
    seconds: float = 0.0
