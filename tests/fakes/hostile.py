"""A peer that takes part as it should and says what it should not, and a loop whose clock jumps."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from equipoise.averaging.ports import Buffer, Channel, Place
from equipoise.averaging.session.messages import ENVELOPE_BYTES, FRAME, encode_envelope
from fakes.memory import MemoryTransport

Frame = tuple[bytes, bytes]

STILL = 1000
"""Steps of a loop without time between them, after which its clock creeps on. A machine that rounds its deadline down
is woken too early, again and again, until the clock has moved, as real ones do."""


class Clock(selectors.DefaultSelector):
    """A selector that never waits: it moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._still = 0

    def select(self, timeout: float | None = None) -> list:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise RuntimeError("everybody waits, and nothing is due")
            self._still = 0 if timeout > 0 else self._still + 1
            self.now += max(timeout, 0.0)
            if self._still > STILL:
                self.now = math.nextafter(self.now, math.inf)
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop on such a clock."""

    def __init__(self) -> None:
        self._clock = Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Work takes no time."""
        done = self.create_future()
        done.set_result(func(*args))
        return done


def run_at_once(work: Coroutine[Any, Any, Any]) -> list[dict]:
    """Run to the end on a clock that jumps; returns what the loop was told went wrong."""
    loop = JumpingLoop()
    wrong: list[dict] = []
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    try:
        loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    return wrong


class TappedChannel:
    """What leaves by it goes through `tap`, within the numbers of the session; what `tap` adds has no number."""

    def __init__(self, channel: Channel, tap: Callable[[str, bytes, bytes], list[Frame]]) -> None:
        self._channel = channel
        self._tap = tap

    @property
    def peer(self) -> str:
        return self._channel.peer

    @property
    def punched(self) -> bool:
        return self._channel.punched

    @property
    def rtt(self) -> float:
        return self._channel.rtt

    @property
    def delivered(self) -> int:
        return self._channel.delivered

    @property
    def in_flight(self) -> int:
        return self._channel.in_flight

    @property
    def received(self) -> int:
        return self._channel.received

    async def send(self, header: Buffer, body: Buffer = b"") -> None:
        envelope, header = bytes(header[:ENVELOPE_BYTES]), bytes(header[ENVELOPE_BYTES:])
        if envelope[:1] != FRAME or not header:
            await self._channel.send(envelope + header, body)
            return
        for said, data in self._tap(self.peer, header, bytes(body)) or [(b"", b"")]:
            await self._channel.send(envelope + said, data)
            envelope = encode_envelope(FRAME, 0, 0)

    async def receive(self, place: Place) -> tuple[bytes, memoryview]:
        return await self._channel.receive(place)

    def close(self) -> None:
        self._channel.close()


class TappedTransport:
    """What leaves by it goes through `tap`, which says what leaves instead."""

    def __init__(self, transport: MemoryTransport, tap: Callable[[str, bytes, bytes], list[Frame]]) -> None:
        self._transport = transport
        self._tap = tap

    @property
    def peer(self) -> str:
        return self._transport.peer

    @property
    def dialable(self) -> bool:
        return self._transport.dialable

    async def open(self, peer: str) -> Channel:
        return TappedChannel(await self._transport.open(peer), self._tap)

    def serve(self, handler: Callable[[Channel], Awaitable[None]] | None) -> None:
        if handler is None:
            self._transport.serve(None)
        else:
            self._transport.serve(lambda channel: handler(TappedChannel(channel, self._tap)))
