"""Base58 in the Bitcoin alphabet, which libp2p prints PeerIDs in (libp2p specs, peer-ids.md)."""

from __future__ import annotations

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUES = {character: value for value, character in enumerate(_ALPHABET)}

MAX_LENGTH = 128
"""Longest text decoded: conversion is quadratic, and the longest PeerID has 52 characters."""


def encode(data: bytes) -> str:
    """Return `data` in base58; each leading zero byte becomes a leading `1`."""
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _ALPHABET[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


def decode(text: str) -> bytes:
    """Return the bytes that `text` encodes.

    Raises:
        ValueError: `text` is too long or holds a character outside the alphabet.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"expected at most {MAX_LENGTH} base58 characters, got {len(text)}")
    number = 0
    for character in text:
        if character not in _VALUES:
            raise ValueError(f"{character!r} is not a base58 character")
        number = number * 58 + _VALUES[character]
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
