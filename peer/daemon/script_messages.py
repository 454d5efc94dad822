"""The messages of one client's script in one run, between its control socket and the other peers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from equipoise.averaging.messaging.sender import Added, Notice
from equipoise.peer.control.messages import (
    SHORT_BYTES,
    Arrival,
    JoinRun,
    ReceiveMessage,
    SendMessage,
)
from equipoise.peer.errors import Refused
from equipoise.peer.shared_memory import MAX_IDLE_BYTES, MappedMemory, MemoryPool, SharedMemory

if TYPE_CHECKING:
    from equipoise.averaging.aio.router import Router

MAX_RECEIVING = 16
"""Most calls of a script that wait for a message at once: they hold requests that others need."""


class _Short:
    """Memory of a short message, which goes to the script by the socket."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))

    def room(self, start: int, size: int) -> memoryview:
        """See `messenger.Memory`."""
        return self.view[start : start + size]


class ScriptMessages:
    """Hands messages over; `mates` are the peers to send to, or those that may send here if called with True."""

    def __init__(
        self, router: Router, joined: JoinRun, mates: Callable[[bool], Awaitable[Mapping[str, bytes]]]
    ) -> None:
        self._router = router
        self._receiving = 0
        self._pool = MemoryPool()
        self._lent: dict[int, MappedMemory] = {}
        self._numbers = itertools.count(1)
        self._messenger = router.exchange(joined.run, joined.mailbox, mates, self._allocate)

    def send(self, request: SendMessage, memory: SharedMemory | None) -> None:
        """Send a message, which lies in `memory` if it is not short.

        Raises:
            Refused: Its length is another than it says, or it is to this peer itself.
            ValueError: Too many wait for the receiver.
        """
        if memory is None and len(request.content) != request.size:
            raise Refused(f"expected a message of {request.size} bytes, got {len(request.content)}")
        content = (
            memoryview(request.content)
            if memory is None
            else memory.view(memory.capacity, False)[: request.size]
        )
        added = Added(request.number, request.acknowledged, request.again, request.receiver)
        self._messenger.send(request.to, request.topic, content, added)

    async def notices(self) -> list[Notice]:
        """Wait for news of messages that were sent."""
        return await self._messenger.notices()

    async def receive(self, request: ReceiveMessage) -> Arrival | None:
        """Take a message.

        Raises:
            Refused: Too many calls wait already.
        """
        for number in request.back:
            if number in self._lent:
                self._pool.give(self._lent.pop(number))
        if self._receiving >= MAX_RECEIVING:
            raise Refused(f"{MAX_RECEIVING} calls wait for messages already", "use fewer threads")
        self._receiving += 1
        try:
            got = await self._messenger.receive(request.topic, request.timeout)
        finally:
            self._receiving -= 1
        if got is None:
            return None
        told = got.peer, got.sender, got.past, got.part.size
        if isinstance(got.memory, _Short):
            return Arrival(*told, bytes(got.memory.view))
        assert isinstance(got.memory, MappedMemory), "this object has made it"
        memory, number = got.memory.memory, 0
        if sum(one.memory.capacity for one in self._lent.values()) + memory.capacity <= MAX_IDLE_BYTES:
            number = next(self._numbers)
            self._lent[number] = got.memory
        return Arrival(*told, b"", memory.capacity, number, os.dup(memory.fd))

    def _allocate(self, size: int) -> MappedMemory | _Short:
        return _Short(size) if size <= SHORT_BYTES else self._pool.take(size)

    def close(self, reason: str, final: bool) -> None:
        """End; see `Messenger.close`."""
        self._router.hang_up(self._messenger, reason, final)
