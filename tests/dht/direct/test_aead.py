"""Records of our own: what is sealed opens once, in order, and nothing else does."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import tracemalloc
from collections import Counter

import pytest

from equipoise.dht.direct import aead
from equipoise.dht.direct.aead import BODY, HEAD, TAG_BYTES, Opener, Sealer
from equipoise.dht.direct.streams import AeadStream
from equipoise.dht.streams import BytesRefused, StreamClosed
from equipoise.dht.transport import FramedChannel
from equipoise.limits import MAX_BODY_BYTES, MAX_HEADER_BYTES
from fakes.alterations import ALTERATIONS, insert, replay

KEY = bytes(range(32))
MUTANTS = 12_000
"""Streams of records, each altered in one of `ALTERATIONS`; with those of the other tests some 20,000."""


def sealed(sealer: Sealer, kind: int, plain: bytes) -> bytes:
    record = memoryview(bytearray(aead.MAX_RECORD_BYTES))
    return bytes(record[: sealer.seal_into(kind, plain, record)])


def opened(opener: Opener, record: bytes) -> tuple[int, bytes]:
    kind, size = opener.parse_prefix(record)
    if len(record) != aead.PREFIX_BYTES + size + TAG_BYTES:
        raise BytesRefused("another size")
    return kind, bytes(opener.open(memoryview(record)))


def test_records_open_in_their_order() -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    for number in range(10):
        plain = os.urandom(1 + number * 1000)
        kind = (HEAD, BODY)[number % 2]
        assert opened(opener, sealed(sealer, kind, plain)) == (kind, plain)


def test_the_same_plaintext_is_never_sealed_alike() -> None:
    sealer = Sealer(KEY)
    assert len({sealed(sealer, HEAD, b"same") for _ in range(100)}) == 100


def test_keys_are_replaced_after_so_many_records(monkeypatch) -> None:
    monkeypatch.setattr(aead, "REKEY_RECORDS", 3)
    sealer, opener, stale = Sealer(KEY), Opener(KEY), Opener(KEY)
    records = [sealed(sealer, HEAD, bytes([number])) for number in range(10)]
    assert [opened(opener, record)[1][0] for record in records] == list(range(10))
    monkeypatch.setattr(aead, "REKEY_RECORDS", 1000)
    assert [opened(stale, record)[1][0] for record in records[:3]] == [0, 1, 2]
    with pytest.raises(BytesRefused, match="record 3 is not authentic"):
        opened(stale, records[3])


def test_a_key_encrypts_no_more_than_the_module_says() -> None:
    """Less than 2^27 blocks, that of the tag included, whatever the largest record is and comes to be."""
    blocks = -(-max(aead.MAX_HEAD_BYTES, aead.PIECE_BYTES) // 16) + 1
    assert blocks * aead.REKEY_RECORDS < 2**27
    sealer, room = Sealer(KEY), memoryview(bytearray(100))
    for _ in range(aead.REKEY_RECORDS):
        assert sealer._key == KEY
        sealer.seal_into(HEAD, b"x", room)
    sealer.seal_into(HEAD, b"x", room)
    assert sealer._key != KEY


@pytest.mark.parametrize("kind", [HEAD, BODY])
def test_a_record_opens_as_what_it_was_sealed_as_and_nothing_else(kind: int) -> None:
    """The prefix is associated data: a body's bytes, which the sender may not have chosen, never pass for a header."""
    record = bytearray(sealed(Sealer(KEY), kind, bytes(100)))
    record[0] = HEAD + BODY - kind
    assert Opener.parse_prefix(record) == (HEAD + BODY - kind, 100)
    with pytest.raises(BytesRefused, match="not authentic"):
        Opener(KEY).open(memoryview(record))
    with pytest.raises(BytesRefused, match="not authentic"):
        Opener(KEY).open_into(memoryview(record), memoryview(bytearray(100)))


def test_nothing_opens_after_one_refusal() -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    first, second = sealed(sealer, HEAD, b"first"), sealed(sealer, HEAD, b"second")
    with pytest.raises(BytesRefused):
        opened(opener, second)
    for record in (first, second):
        with pytest.raises(BytesRefused, match="before"):
            opened(opener, record)


def test_sizes_are_bounded() -> None:
    sealer, room = Sealer(KEY), memoryview(bytearray(aead.MAX_RECORD_BYTES + 1))
    for kind, size in ((HEAD, 0), (BODY, 0), (HEAD, aead.MAX_HEAD_BYTES + 1), (BODY, aead.PIECE_BYTES + 1)):
        with pytest.raises(ValueError, match="expected 1 to"):
            sealer.seal_into(kind, bytes(size), room)
        with pytest.raises(BytesRefused):
            Opener.parse_prefix((kind << 24 | size).to_bytes(4, "big"))
    for kind in (0, 3, 255):
        with pytest.raises(BytesRefused, match="kind"):
            Opener.parse_prefix((kind << 24 | 1).to_bytes(4, "big"))


def wire(*frames: tuple[bytes, bytes]) -> list[bytes]:
    """The records of `frames`, cut as `AeadStream.send` cuts them, bodies into small pieces."""
    sealer, records = Sealer(KEY), []
    for header, body in frames:
        prefix = len(header).to_bytes(4, "big") + len(body).to_bytes(4, "big")
        records.append(sealed(sealer, HEAD, prefix + header))
        records += [sealed(sealer, BODY, body[at : at + 64]) for at in range(0, len(body), 64)]
    return records


class Victim:
    """A channel of the real parser, fed by hand."""

    def __init__(self, opener: Opener | None = None) -> None:
        self.feeder, end = socket.socketpair()
        self.stream = AeadStream(end, Sealer(KEY), opener or Opener(KEY))
        self.placed = 0
        self.channel = FramedChannel("12D3KooWoffender", self.stream, lambda channel: None)

    async def read(self, data: bytes) -> tuple[list[tuple[bytes, bytes]], str]:
        """The frames that arrive of `data`, and why no more did."""
        self.feeder.sendall(data)
        self.feeder.close()
        frames = []
        try:
            while True:
                header, body = await self.channel.receive(self._place)
                frames.append((header, bytes(body)))
        except ConnectionError as error:
            return frames, str(error)

    def _place(self, header: bytes, size: int) -> memoryview:
        self.placed += size
        return memoryview(bytearray(size))


FRAMES = [(b"one", b""), (b"two", bytes(range(200))), (b"", bytes(100)), (b"four" * 20, b"")]


async def test_the_feeder_speaks_the_protocol() -> None:
    frames, why = await Victim().read(b"".join(wire(*FRAMES)))
    assert frames == FRAMES
    assert "closed by the other end" in why


async def test_no_altered_stream_yields_a_frame_that_was_not_sent() -> None:
    rng, records, reasons = random.Random(3), wire(*FRAMES), Counter()
    for number in range(MUTANTS):
        alter = ALTERATIONS[number % len(ALTERATIONS)]
        victim = Victim()
        frames, why = await victim.read(b"".join(alter(rng, records)))
        assert frames == FRAMES[: len(frames)], alter.__name__
        assert len(frames) < len(FRAMES) or alter in (replay, insert), alter.__name__
        assert "12D3KooWoffender" in why
        assert victim.placed <= 300
        assert victim.stream.closed
        reasons[why.split(": ", 1)[1].split()[0]] += 1
    assert len(reasons) > 2, "the mutants die of different things"


async def test_closed_streams_hold_no_buffers() -> None:
    tracemalloc.start()
    try:
        victims = [Victim() for _ in range(20)]
        for victim in victims:
            victim.stream.close("for this test")
            with pytest.raises(StreamClosed, match="for this test"):
                await victim.stream.send(b"head", b"body")
            with pytest.raises(StreamClosed, match="for this test"):
                await victim.stream.receive_into(memoryview(bytearray(8)))
            victim.feeder.close()
        assert tracemalloc.get_traced_memory()[0] < aead.MAX_RECORD_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "plain", "said"),
    [
        (HEAD, (MAX_HEADER_BYTES + 1).to_bytes(4, "big") + bytes(4), "above the maximum"),
        (HEAD, bytes(4) + (MAX_BODY_BYTES + 1).to_bytes(4, "big"), "above the maximum"),
        (HEAD, b"\xff" * 8, "above the maximum"),
        (BODY, b"\0" * 9, "a record of 9 bytes where 8 are left"),
    ],
)
async def test_a_member_that_breaks_the_rules_is_dropped(
    kind: int, plain: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    victim = Victim()
    frames, why = await victim.read(sealed(Sealer(KEY), kind, plain))
    assert not frames
    assert said in why
    assert said in caplog.text
    assert victim.placed == 0
    assert victim.stream.closed


async def test_a_body_record_that_overruns_its_body_is_refused() -> None:
    sealer = Sealer(KEY)
    head = sealed(sealer, HEAD, bytes(4) + (100).to_bytes(4, "big"))
    frames, why = await Victim().read(head + sealed(sealer, BODY, bytes(101)))
    assert not frames
    assert "where 100 are left" in why


async def test_keys_are_replaced_in_the_middle_of_frames(monkeypatch) -> None:
    monkeypatch.setattr(aead, "REKEY_RECORDS", 2)
    victim, body = Victim(), os.urandom(MAX_BODY_BYTES)
    sender = AeadStream(victim.feeder, Sealer(KEY), Opener(KEY))
    sending = asyncio.ensure_future(FramedChannel("me", sender, lambda channel: None).send(b"header", body))
    header, place = await victim.channel.receive(lambda _, size: memoryview(bytearray(size)))
    await sending
    assert (header, place) == (b"header", body)
    victim.channel.close()
    sender.close()
