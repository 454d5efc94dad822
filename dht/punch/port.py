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

from equipoise.dht.direct import mirror
from equipoise.dht.punch.places import Place, Places, judge

MIRRORS = 2
"""Public peers that are asked; two tell a NAT that maps each destination to another port."""
MIRROR_SECONDS = 2.0
"""For an answer: a connection and a round trip. Half of `machine.MEASURE_SECONDS`."""
AGAIN_SECONDS = 0.1
"""After a refusal: a router that answers for its host has not heard of this connection's other end yet."""

_PASSING = {errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENOTCONN}

_log = logging.getLogger(__name__)


class SharedPort:
    """One local port, taken at first use."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._number = 0

    async def measure(self, mirrors: Sequence[Place]) -> Places:
        """Find out where connections that leave from here come from, as public peers see them.

        The connections to them stay open, and with them the router's mapping.

        Raises:
            NoPlace: They do not answer, or each tells another place.
        """
        # The first one takes the port; all are of its kind of address.
        alike = [place for place in mirrors if (":" in place[0]) == (":" in mirrors[0][0])]
        answers = await asyncio.gather(*(self._ask(place) for place in alike[:MIRRORS]))
        told = [answer for answer in answers if answer is not None]
        return judge([seen for seen, _ in told], [inside for _, inside in told])

    async def connect(self, place: Place) -> socket.socket:
        """Open a connection to a place that opens one to here, from both ends at once; until cancelled.

        Raises:
            OSError: It cannot come about.
        """
        while True:
            connection = self._bound(place[0])
            try:
                await asyncio.get_running_loop().sock_connect(connection, place)
                if connection.getsockname() != connection.getpeername():
                    return connection
                raise ConnectionError("that is this port itself")
            except OSError as error:
                connection.close()
                if error.errno not in _PASSING:
                    raise
            except BaseException:
                connection.close()
                raise
            await asyncio.sleep(AGAIN_SECONDS)

    def close(self) -> None:
        """Close what is held open; idempotent."""
        for connection in self._held:
            connection.close()
        self._held = []

    async def _ask(self, place: Place) -> tuple[Place, Place] | None:
        """Return where `place` sees a connection come from, and where that comes from in truth."""
        connection = self._bound(place[0])
        self._held.append(connection)
        try:
            async with asyncio.timeout(MIRROR_SECONDS):
                await asyncio.get_running_loop().sock_connect(connection, place)
                return await mirror.ask(connection), connection.getsockname()[:2]
        except OSError as error:
            _log.debug("%s port %d does not tell where connections come from: %s", *place, error)
            return None

    def _bound(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.bind(("", self._number))
            self._number = connection.getsockname()[1]
        except BaseException:
            connection.close()
            raise
        return connection
