"""Has holes punched to the peers met in rounds that cannot be dialled, and answers those that do.

A round in the meantime goes on through its relay; the channel is there for the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from equipoise.dht.dialer import Dialer
from equipoise.dht.direct.channel import DirectChannel
from equipoise.dht.direct.transport import DirectTransport
from equipoise.dht.escaping import printable
from equipoise.dht.inbound import Inbound
from equipoise.dht.limits import RateLimit
from equipoise.dht.link import Link
from equipoise.dht.punch.coordination import Coordination
from equipoise.dht.punch.messages import MAX_REASON_CHARACTERS, PUNCH_PROTOCOL, End, encode
from equipoise.dht.punch.places import Place
from equipoise.dht.punch.port import SharedPort
from equipoise.dht.punch.wishes import Wishes
from equipoise.dht.streams import Stream, send_message

CHECK_SECONDS = 1.0
"""How often it is looked whether a hole is wanted."""
OPEN_SECONDS = 5.0
"""To open a stream through a relay."""
MAX_ANSWERED = 32
"""Punches under way that others began, an eighth of them for one peer; each holds a stream and a few sockets."""
HANG_UP_SECONDS = 2.0
"""For whoever was refused to read why: a stream that is closed under it would be cut before."""
CALLS_PER_SECOND = 0.1
BURST = 4.0
"""An honest peer begins anew after 15 s at the earliest."""

TRIES_PER_SECOND = 0.2
TRIES_BURST = 12.0
"""Tries of one address that one peer names: a member that lies, or has been lied to, names somebody else's. Each try is
some five packets; a punch has three."""
ADDRESS_TRIES_PER_SECOND = 1.0
ADDRESS_TRIES_BURST = 60.0
"""Tries of one address, whoever names it: twenty punches with peers behind one router."""

_log = logging.getLogger(__name__)


class Puncher:
    """Decides when a hole is punched, and keeps what came of it.

    Attributes:
        mirrors: Tells the direct listeners of public peers, which see where connections come from.
        hidden: Tells whether this peer is one that listens and cannot be dialled.
    """

    def __init__(self, link: Link, dialer: Dialer, direct: DirectTransport, folder: Path) -> None:
        self.mirrors: Callable[[], Sequence[Place]] = tuple
        self.hidden: Callable[[], bool] = lambda: False
        self._link = link
        self._dialer = dialer
        self._direct = direct
        self._wishes = Wishes()
        self._limit = RateLimit(CALLS_PER_SECOND, BURST)
        self._tries = RateLimit(TRIES_PER_SECOND, TRIES_BURST)
        self._address_tries = RateLimit(ADDRESS_TRIES_PER_SECOND, ADDRESS_TRIES_BURST)
        self._inbound = Inbound(PUNCH_PROTOCOL, folder / "punch.sock", MAX_ANSWERED, self._answer)
        self._tasks: set[asyncio.Task[None]] = set()

    def want(self, peer: str) -> None:
        """A round with `peer` has begun."""
        if self.hidden():
            self._wishes.want(peer, asyncio.get_running_loop().time())

    def failure(self, peer: str) -> str:
        """Return why the last punch with `peer` failed; empty if it did not, or none has ended."""
        return self._wishes.failure(peer)

    def listen(self) -> None:
        """Start to take streams from p2pd, and to punch."""
        self._inbound.listen()
        self._spawn(self._run())

    async def attach(self) -> None:
        """Have a (new) p2pd send streams here.

        Raises:
            LinkError: p2pd does not answer.
        """
        await self._inbound.attach(self._link)

    async def stop(self) -> None:
        """End everything; idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._inbound.stop()

    async def _run(self) -> None:
        while True:
            if self._link.attached and self.hidden():
                for peer in self._wishes.due(asyncio.get_running_loop().time(), self._begins):
                    self._wishes.began(peer)
                    self._spawn(self._begin(peer))
            await asyncio.sleep(CHECK_SECONDS)

    def _begins(self, peer: str) -> bool:
        """Whether it is for this side to begin a punch, and there is need of one."""
        return self._direct.peer < peer and not self._direct.linked(peer)

    async def _begin(self, peer: str) -> None:
        failure = "it was broken off"
        try:
            await self._dialer.reach(peer)
            stream = await self._link.open_stream(peer, PUNCH_PROTOCOL, OPEN_SECONDS)
            try:
                failure = await self._punch(peer, stream, begins=True)
            finally:
                stream.close()
        except ConnectionError as error:
            failure = f"no stream to it can be opened: {error}"
        finally:
            self._end(peer, failure)

    async def _answer(self, peer: str, relayed: bool, stream: Stream) -> None:
        refusal = self._refusal(peer)
        if refusal:
            await send_message(stream, encode(End(refusal[:MAX_REASON_CHARACTERS])))
            async with asyncio.timeout(HANG_UP_SECONDS):
                await stream.wait_readable()
            return
        self._wishes.began(peer)
        failure = "it was broken off"
        try:
            failure = await self._punch(peer, stream, begins=False)
        finally:
            self._end(peer, failure)

    def _refusal(self, peer: str) -> str:
        """Why this peer takes no part in a punch that another begins; empty if it does."""
        now = asyncio.get_running_loop().time()
        if not self._limit.allow(peer, now):
            return "it is asked too often"
        if not self.hidden():
            return "it is not behind a NAT, as far as it knows"
        if peer > self._direct.peer:
            return "it is for itself to begin"
        return self._wishes.refusal(peer, now)

    async def _punch(self, peer: str, stream: Stream, begins: bool) -> str:
        """Return why there is no hole; empty if there is one."""

        async def connect(port: SharedPort, place: Place) -> DirectChannel:
            now, host = asyncio.get_running_loop().time(), place[0]
            if not (self._tries.allow(f"{peer} {host}", now) and self._address_tries.allow(host, now)):
                raise ConnectionError("that address is tried too often")
            connection = await port.connect(place)
            return await self._direct.punch(peer, connection, place, dialled=begins)

        coordination = Coordination(stream, begins, self.mirrors(), connect)
        failure = await coordination.run()
        if coordination.channel is not None:
            self._direct.park(coordination.channel, dialled=begins)
            _log.info("a hole to %s is punched, at try %d", peer, coordination.tries)
        return failure

    def _end(self, peer: str, failure: str) -> None:
        failure = printable(failure)
        if failure:
            _log.info("no hole to %s: %s", peer, failure)
        self._wishes.ended(peer, failure, asyncio.get_running_loop().time())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Only a bug of ours ends a task by an exception.
            _log.error("punching failed", exc_info=task.exception())
