"""What somebody in between may do to the records of one direction: each way breaks them, or adds to them."""

from __future__ import annotations

import random

from equipoise.dht.direct import aead


def flip(rng: random.Random, records: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(records))
    record = bytearray(records[at])
    record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
    return [*records[:at], bytes(record), *records[at + 1 :]]


def truncate(rng: random.Random, records: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(records))
    return [*records[:at], records[at][: rng.randrange(len(records[at]))]]


def cut_within(rng: random.Random, records: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(records))
    middle = rng.randrange(len(records[at]))
    return [*records[:at], records[at][:middle] + records[at][middle + 1 :], *records[at + 1 :]]


def replay(rng: random.Random, records: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(records))
    return [*records[: at + 1], *records[rng.randrange(at + 1) :]]


def reorder(rng: random.Random, records: list[bytes]) -> list[bytes]:
    first, second = sorted(rng.sample(range(len(records)), 2))
    moved = list(records)
    moved[first], moved[second] = moved[second], moved[first]
    return moved


def drop(rng: random.Random, records: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(records) - 1)
    return records[:at] + records[at + 1 :]


def insert(rng: random.Random, records: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(records))
    return [*records[:at], rng.randbytes(rng.randrange(1, 300)), *records[at:]]


def oversize(rng: random.Random, records: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(records))
    size = rng.randrange(aead.MAX_HEAD_BYTES + 1, 1 << 24)
    kind = rng.randrange(256)
    return [*records[:at], (kind << 24 | size).to_bytes(4, "big") + records[at][4:], *records[at + 1 :]]


def resize(rng: random.Random, records: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(records))
    size = rng.randrange(1, 400)
    kind = records[at][0]
    altered = (kind << 24 | size).to_bytes(4, "big") + records[at][4:]
    return [*records[:at], altered, *records[at + 1 :]] if altered != records[at] else records[:at]


ALTERATIONS = (flip, truncate, cut_within, replay, reorder, drop, insert, oversize, resize)
"""`oversize` and `resize` write prefixes of `aead`; in records of TLS they spoil type, version and size."""
