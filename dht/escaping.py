"""Strings that strangers wrote, made fit for a terminal and a log."""

from __future__ import annotations

MAX_SHOWN_CHARACTERS = 200
"""A foreign string takes at most two lines of a terminal."""


def printable(text: str, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return `text` with control characters, direction overrides and the like escaped, cut to `limit` characters."""
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[:limit]
    )
    return shown if len(shown) <= limit and len(text) <= limit else shown[: limit - 3] + "..."
