"""Channels that were opened ahead of the round that will use them, through holes in NATs.

A round that is under way goes on as it began. The side that counts as the one that has dialled keeps the channel until
a round asks for one; the other side hands it on when the first byte comes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from equipoise.dht.tasks import TaskSet
from equipoise.dht.transport import FramedChannel

PARKED_SECONDS = 600.0
"""Longest time that a channel waits for a round; some rounds are minutes apart."""


class PunchedChannels:
    """Punched channels: those that wait for a round, and which are still open."""

    def __init__(self, serve: Callable[[FramedChannel], Awaitable[None]]) -> None:
        """`serve` takes over a channel that the other side has begun to use, and returns when that is over."""
        self._serve = serve
        self._kept: dict[str, tuple[FramedChannel, asyncio.Task[None]]] = {}
        self._newest: dict[str, FramedChannel] = {}
        self._tasks = TaskSet()

    def park(self, channel: FramedChannel, *, dialled: bool) -> None:
        """Keep a channel until it is taken (`dialled`) or used by the other side."""
        self._newest = {peer: one for peer, one in self._newest.items() if not one.closed}
        self._newest[channel.peer] = channel
        task = self._tasks.spawn(self._keep(channel) if dialled else self._hold(channel))
        if dialled:
            before, _ = self._kept.get(channel.peer, (None, None))
            self._kept[channel.peer] = channel, task
            if before is not None:
                before.close()

    def keeps(self, peer: str) -> bool:
        """Whether a channel to `peer` can be taken."""
        return peer in self._kept

    def open(self, peer: str) -> bool:
        """Whether a punched channel with `peer` is open, in use or not."""
        channel = self._newest.get(peer)
        return channel is not None and not channel.closed

    async def take(self, peer: str) -> FramedChannel | None:
        """Return the channel to `peer` that is kept, for good; None if there is none or it has broken."""
        channel, watch = self._kept.pop(peer, (None, None))
        if channel is None or watch is None:
            return None
        # One task at a time may wait for its bytes.
        watch.cancel()
        try:
            await asyncio.wait({watch})
        except asyncio.CancelledError:
            channel.close()
            raise
        return None if channel.closed else channel

    async def stop(self) -> None:
        """Keep nothing any more; idempotent. Channels are closed by whoever counts them."""
        await self._tasks.stop()

    async def _keep(self, channel: FramedChannel) -> None:
        # The other side speaks only when spoken to: whatever comes, it is the end.
        await self._first_byte(channel)
        if self._kept.get(channel.peer, (None, None))[0] is channel:
            del self._kept[channel.peer]
        channel.close()

    async def _hold(self, channel: FramedChannel) -> None:
        if await self._first_byte(channel):
            await self._serve(channel)
        channel.close()

    async def _first_byte(self, channel: FramedChannel) -> bool:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(PARKED_SECONDS):
                await channel.wait_readable()
                return True
        return False
