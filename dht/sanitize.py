"""Bytes and text of strangers, decoded within bounds and made fit for a terminal; files that may be anything."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

MAX_SHOWN_CHARACTERS = 200
"""Most characters of a foreign string that are shown: two lines of a terminal."""

_T = TypeVar("_T")


class Malformed(ValueError):
    """Bytes of a stranger, or a record, are not as they must be; the message says why, in one line."""


def decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes, limit: int, what: str = "message") -> _T:
    """Decode one msgpack value of at most `limit` bytes.

    msgspec bounds the rest by itself, also in fields that it skips: it recurses no deeper than Python may, and takes no
    memory for elements that are announced and not there. Raises Malformed if the value is longer, cut off, of another
    type, too deep, or bytes follow it.
    """
    if len(data) > limit:
        raise Malformed(f"malformed {what}: expected at most {limit} bytes, got {len(data)}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"malformed {what}: {printable(str(error))}") from None


def escaped(text: str, kept: str = "\t\n") -> str:
    """Return `text` with control characters, direction overrides and the like escaped, except those in `kept`."""
    shown = (c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)
    return text if text.isprintable() else "".join(shown)


def printable(text: str, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return `text` escaped, and cut to `limit` characters."""
    shown = escaped(text[:limit], kept="")
    return shown if len(shown) <= limit and len(text) <= limit else shown[: limit - 3] + "..."


def read_regular(path: Path, limit: int) -> bytes:
    """Return a regular file's content, cut to `limit` bytes, never waiting for a pipe or device; raises OSError."""
    # To open a pipe that nobody writes to would block without O_NONBLOCK; regular files ignore the flag.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read(limit)
