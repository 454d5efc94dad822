"""Numbers of things, in messages for people."""

from __future__ import annotations


def count(number: int, what: str) -> str:
    """Return `1 peer`, `2 peers`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
