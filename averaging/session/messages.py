"""The frames of a session: a hello on each channel, then frames in envelopes, at last a farewell."""

from __future__ import annotations

import struct

from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.session.machine import SESSION_BYTES, Hello

HELLO = b"H"
"""First byte of the first frame of each end on a channel."""

FRAME = b"N"
"""First byte of every other frame; its number and an acknowledgement follow, then the header."""

FAREWELL = b"F"
"""First byte of the last frame of each end on a channel that is closed as idle; an acknowledgement follows."""

_HELLO = struct.Struct(f"<c{SESSION_BYTES}s{SESSION_BYTES}sQ")
_ENVELOPE = struct.Struct("<cQQ")

ENVELOPE_BYTES = _ENVELOPE.size
"""Length of what goes before the header of a frame."""


def encode_hello(hello: Hello) -> bytes:
    """Return the header of a hello."""
    return _HELLO.pack(HELLO, hello.session, hello.partner, hello.delivered)


def decode_hello(header: bytes) -> Hello:
    """Parse the header of a hello.

    Raises:
        FrameRefused: The header is not that of a hello.
    """
    if header[:1] != HELLO or len(header) != _HELLO.size:
        raise FrameRefused(
            f"expected a hello of {_HELLO.size} bytes, got {header[:1]!r} in {len(header)} bytes"
        )
    _, session, partner, delivered = _HELLO.unpack(header)
    return Hello(session, b"" if partner == bytes(SESSION_BYTES) else partner, delivered)


def encode_envelope(kind: bytes, number: int, acknowledged: int) -> bytes:
    """Return what goes before the header of a frame."""
    return _ENVELOPE.pack(kind, number, acknowledged)


def decode_envelope(header: bytes) -> tuple[bytes, int, int]:
    """Parse the envelope of a frame: its kind, its number, and what it acknowledges.

    Raises:
        FrameRefused: The header begins with no envelope.
    """
    whole = len(header) >= ENVELOPE_BYTES
    kind, number, acknowledged = _ENVELOPE.unpack_from(header) if whole else (b"", 0, 0)
    if kind not in (FRAME, FAREWELL):
        raise FrameRefused(f"expected a frame of a session, got {header[:1]!r} in {len(header)} bytes")
    return kind, number, acknowledged
