"""Channels that were opened ahead of the round that will use them, through holes in NATs.

A round that is under way goes on as it began. The side that counts as the one that has dialled keeps the channel until
a round asks for one; the other side hands it on when the first byte comes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from equipoise.dht.direct.channel import DirectChannel

PARKED_SECONDS = 600.0
"""A channel that no round has wanted for so long is closed; some rounds are minutes apart."""
ALIVE_SECONDS = 20
"""Nothing said for so long, the kernel asks whether the other end is there: routers forget connections that rest."""
ALIVE_PROBES = 3


class Parking:
    """Punched channels: those that wait for a round, and which are still open."""

    def __init__(self, serve: Callable[[DirectChannel], Awaitable[None]]) -> None:
        """`serve` takes over a channel that the other side has begun to use, and returns when that is over."""
        self._serve = serve
        self._kept: dict[str, tuple[DirectChannel, asyncio.Task[None]]] = {}
        self._newest: dict[str, DirectChannel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def park(self, channel: DirectChannel, *, dialled: bool) -> None:
        """Keep a channel until it is taken (`dialled`) or used by the other side."""
        self._newest = {peer: one for peer, one in self._newest.items() if not one.closed}
        self._newest[channel.peer] = channel
        task = asyncio.create_task(self._keep(channel) if dialled else self._hold(channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
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

    async def take(self, peer: str) -> DirectChannel | None:
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
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _keep(self, channel: DirectChannel) -> None:
        # The other side speaks only when spoken to: whatever comes, it is the end.
        await self._first_byte(channel)
        if self._kept.get(channel.peer, (None, None))[0] is channel:
            del self._kept[channel.peer]
        channel.close()

    async def _hold(self, channel: DirectChannel) -> None:
        if await self._first_byte(channel):
            await self._serve(channel)
        channel.close()

    async def _first_byte(self, channel: DirectChannel) -> bool:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(PARKED_SECONDS):
                await channel.wait_readable()
                return True
        return False


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out, while nothing is said, whether the other end is still there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", ALIVE_SECONDS),
        ("TCP_KEEPINTVL", ALIVE_SECONDS),
        ("TCP_KEEPCNT", ALIVE_PROBES),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
