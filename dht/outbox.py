"""The newest record, on its way to many peers: a slow or dead one delays nobody, and gets only the last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable

MAX_TARGETS = 64
"""Peers told of a change directly; others find it in the DHT."""
MAX_UNCONNECTED = 16
"""Of them, those that have to be dialled first: records cost nothing, and must not keep the news from who is there."""
MAX_ATTEMPTS = 4
"""Then the peer is told again at the next renewal, if it is still one to be told."""
RETRY_SECONDS = 0.5
"""p2pd is back, or attached again, about so long after it broke."""

Send = Callable[[str, bytes], Awaitable[bool]]


class Outbox:
    """Sends the newest version of one record to each of a set of peers."""

    def __init__(self, send: Send, connected: Callable[[], Container[str]]) -> None:
        """`connected` tells the PeerIDs that need not be dialled."""
        self._send = send
        self._connected = connected
        self._newest = b""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def publish(self, data: bytes, targets: Iterable[str]) -> None:
        """Send `data` to `targets`, at once to those not being sent to, afterwards to the others."""
        self._newest = data
        connected = self._connected()
        targets = sorted(targets, key=lambda peer: peer not in connected)[:MAX_TARGETS]
        unconnected = sum(peer not in connected for peer in self._tasks)
        for peer in targets:
            if peer in self._tasks:
                continue
            if peer not in connected:
                if unconnected >= MAX_UNCONNECTED:
                    break
                unconnected += 1
            self._tasks[peer] = asyncio.create_task(self._deliver(peer))

    async def drained(self, seconds: float) -> None:
        """Wait until all are sent, at most `seconds`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=seconds)

    async def close(self) -> None:
        """Stop sending."""
        tasks = set(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _deliver(self, peer: str) -> None:
        sent, failures = b"", 0
        try:
            while sent != self._newest and failures < MAX_ATTEMPTS:
                newest = self._newest
                if await self._send(peer, newest):
                    sent, failures = newest, 0
                else:
                    failures += 1
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            del self._tasks[peer]
