"""A local TCP port that several connections leave from, as they must for a NAT to give all of them one mapping.

Not the direct listener's port: to share that, the listener too would need SO_REUSEPORT, and a second daemon told to
listen there would start and take half of its connections instead of being refused.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence

from equipoise.dht.direct import stun
from equipoise.dht.direct.sockets import said, shown
from equipoise.dht.punch.messages import Candidates, Place, judge
from equipoise.dht.streams import Acceptor, closed_on_failure
from equipoise.dht.tasks import sleep_until

MIRRORS = 3
"""Most public peers asked: two tell a NAT that maps each destination to another port, a third outvotes a liar."""
MIRROR_SECONDS = 2.0
"""Longest wait for an answer: a connection and a round trip. Half of `machine.MEASURE_SECONDS`."""
AGAIN_SECONDS = 0.1
"""After a refusal: the other side, or its router, has not heard of this one yet. Each pause is twice as long as the one
before: a member that names somebody else's address has few packets sent there."""
MAX_ARRIVED = 4
"""Most connections that came from outside and were not asked for yet; the oldest goes."""

_PASSING = {
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTUNREACH,
    errno.ENOTCONN,
    errno.EADDRNOTAVAIL,
    errno.EADDRINUSE,
}
"""What may be otherwise a moment later; the last two while the same connection is being made from the other end."""

_log = logging.getLogger(__name__)


class SharedPort:
    """One local port, taken at first use."""

    def __init__(self) -> None:
        self._number = 0
        self._acceptor: Acceptor | None = None
        self._held: list[socket.socket] = []
        self._arrived: dict[str, socket.socket] = {}
        self._arrival = asyncio.Event()

    async def measure(self, mirrors: Sequence[Place]) -> Candidates:
        """Find out where connections that leave from here come from, as public peers see them.

        The connections to those peers stay open, and with them the router's mapping. Raises OSError if none of the
        peers answers, or no port can be had.
        """
        # The first one takes the port; all are of its kind of address.
        alike = [place for place in mirrors if (":" in place[0]) == (":" in mirrors[0][0])]
        answers = await asyncio.gather(*(self._ask(place) for place in alike[:MIRRORS]))
        told = [answer for answer in answers if answer is not None]
        return judge([seen for seen, _ in told], [inside for _, inside in told])

    async def connect(self, place: Place) -> socket.socket:
        """Open a connection to a place that opens one to here, from both ends at once; until cancelled.

        If the other side's first packet comes while this one does not dial, it finds a listener: a neighbour's machine
        would refuse it otherwise. Raises OSError if no connection can come about.
        """
        self._listen(place[0])
        pause = AGAIN_SECONDS
        while True:
            self._arrival.clear()
            connection = self._arrived.pop(place[0], None) or await self._dial(place)
            if connection is not None:
                return connection
            await sleep_until(self._arrival, pause)
            pause *= 2

    def close(self) -> None:
        """Close what is held open; idempotent."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        for connection in (*self._held, *self._arrived.values()):
            connection.close()
        self._held, self._arrived = [], {}

    async def _ask(self, place: Place) -> tuple[Place, Place] | None:
        """Return where `place` sees a connection come from, and where that comes from in truth."""
        connection = self._bound(place[0])
        self._held.append(connection)
        try:
            async with asyncio.timeout(MIRROR_SECONDS):
                await asyncio.get_running_loop().sock_connect(connection, place)
                return await stun.ask(connection), connection.getsockname()[:2]
        except OSError as error:
            _log.debug("%s does not tell where connections come from: %s", shown(place), said(error))
            return None

    async def _dial(self, place: Place) -> socket.socket | None:
        """Return a connection; None if it was refused."""
        try:
            with closed_on_failure(self._bound(place[0])) as connection:
                await asyncio.get_running_loop().sock_connect(connection, place)
                if connection.getsockname() == connection.getpeername():
                    raise ConnectionError("that is this port itself")
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            return None
        return connection

    def _listen(self, host: str) -> None:
        if self._acceptor is None:
            self._acceptor = Acceptor(self._bound(host), MAX_ARRIVED, self._take)

    def _take(self, connection: socket.socket, address: Place) -> None:
        # Its port may be another than was told, where only the other side's router draws ports.
        full = address[0] not in self._arrived and len(self._arrived) >= MAX_ARRIVED
        before = self._arrived.pop(next(iter(self._arrived)) if full else address[0], None)
        if before is not None:
            before.close()
        self._arrived[address[0]] = connection
        self._arrival.set()

    def _bound(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with closed_on_failure(socket.socket(family, socket.SOCK_STREAM)) as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            connection.bind(("", self._number))
            self._number = connection.getsockname()[1]
        return connection
