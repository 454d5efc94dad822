"""One end of a session by hand: for tests that say what no daemon says."""

from __future__ import annotations

import os
from typing import Protocol

from equipoise.averaging.ports import Buffer, Place
from equipoise.averaging.session import messages as wire
from equipoise.averaging.session.machine import SESSION_BYTES, Session


class Channel(Protocol):
    """The part of a channel that a speaker needs."""

    async def send(self, header: bytes, body: Buffer = b"") -> None: ...

    async def receive(self, place: Place) -> tuple[bytes, memoryview]: ...


def _memory(header: bytes, size: int) -> memoryview:
    return memoryview(bytearray(size))


class Speaker:
    """Numbers its frames, and sends them on one channel; `session` may be one that another channel began."""

    def __init__(self, channel: Channel, before: Speaker | None = None) -> None:
        self.channel = channel
        self.session: Session[None] = before.session if before else Session(os.urandom(SESSION_BYTES))
        self.sent: int = before.sent if before else 0

    async def greet(self, dialled: bool = True) -> None:
        """Exchange hellos."""
        if dialled:
            await self.channel.send(wire.encode_hello(self.session.hello()))
        header, _ = await self.channel.receive(_memory)
        assert self.session.greet(wire.decode_hello(header))
        if not dialled:
            await self.channel.send(wire.encode_hello(self.session.hello()))

    async def send(self, header: bytes, body: Buffer = b"") -> None:
        """Send the next frame."""
        self.sent += 1
        await self.channel.send(self.sealed(header, self.sent, self.session.delivered), body)

    async def receive(self, place: Place = _memory) -> tuple[bytes, memoryview]:
        """Receive the next frame that is not empty."""
        while True:
            header, body = await self.channel.receive(
                lambda header, size: place(header[wire.ENVELOPE_BYTES :], size)
            )
            self.session.take(wire.decode_envelope(header)[1], 0)
            if header := header[wire.ENVELOPE_BYTES :]:
                return header, body

    def sealed(self, header: bytes, number: int, acknowledged: int = 0) -> bytes:
        """Return a header in its envelope."""
        return wire.encode_envelope(wire.FRAME, number, acknowledged) + header
