"""Settings as text: what is equal on two peers reads the same, and what differs does not."""

from __future__ import annotations


def number(value: float) -> str:
    """A number: whole if it is, and otherwise with every digit that tells it from the next."""
    return f"{value:.0f}" if float(value).is_integer() else repr(float(value))
