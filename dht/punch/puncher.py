"""Punches holes to peers met in rounds that cannot be dialled, and answers peers that begin a punch.

A round under way goes on through its relay until the hole is there, and then through that.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from equipoise.dht import streams
from equipoise.dht.autonat import Reach
from equipoise.dht.dialer import Dialer
from equipoise.dht.dialpolicy import Place
from equipoise.dht.direct.listener import ask_origin
from equipoise.dht.direct.sockets import said, shown
from equipoise.dht.direct.transport import DirectTransport
from equipoise.dht.limits import Failure
from equipoise.dht.p2pd_client import P2pdClient
from equipoise.dht.punch import candidates
from equipoise.dht.punch.candidates import Candidates, End, Go, Message, Probe
from equipoise.dht.sanitize import Malformed, printable
from equipoise.dht.streams import Acceptor, Stream, StreamClosed
from equipoise.dht.transport import FramedChannel
from equipoise.limits import LruDict, RateLimit, backoff
from equipoise.tasks import TaskSet, sleep_until

WANTED_SECONDS = 600.0
"""Longest time after the last round with a peer in which it is still worth a hole: some rounds are minutes apart."""
FIRST_RETRY_SECONDS = 15.0
MAX_RETRY_SECONDS = 600.0
"""First and longest pause after a failed punch; each pause is twice the pause before. The other side may have been late
or busy, but a NAT that forbids holes seldom changes, and each attempt costs a relay a few messages. After a success the
pause is the first one: some routers let connections begin, but not last."""
PATIENCE_SECONDS = 2.0
"""Time from meeting a peer to the first punch: one may dial the other, and the other side learns of the round later."""
MAX_RESULTS = 256
"""Most peers for which the result of the last punch is kept. A group has at most 64 members."""
MAX_AT_ONCE = 4
"""Most punches under way that this peer began: each holds a stream and a few sockets."""
CHECK_SECONDS = 1.0
"""Longest time until a due punch begins."""
OPEN_SECONDS = 5.0
"""Longest time to open a stream through a relay."""
MAX_ANSWERED = 32
"""Most punches under way that others began, an eighth of them for one peer; each holds a stream and a few sockets."""
HANG_UP_SECONDS = 2.0
"""Longest time for a refused peer to read the reason: closing the stream at once would cut it off."""
CALLS_PER_SECOND = 1 / FIRST_RETRY_SECONDS
BURST = 4.0
"""Most punches that one peer may begin: a member that lies, or was lied to, names a third party's address."""
TRIES_PER_SECOND = 1.0
TRIES_BURST = 60.0
"""Most tries of one address, whichever peers name it: twenty punches with peers behind one router. A try is some five
packets."""

MAX_TRIES = 3
"""Most tries of one punch, as in DCUtR: a hole that three tries do not open, thirty do not either."""
TRY_SECONDS = 2.0
"""Length of a try that opens no channel; the kernel repeats a connection's first packet after 1 s."""
ANSWER_SECONDS = 8.0
"""Longest wait for the other side's next message, which may measure first; a relay that is busy takes seconds."""
MAX_LEAD_SECONDS = 1.0
"""Longest wait for `Go` to reach the other side; with a slower relay the two sides would not be in step anyway."""
MIRRORS = 3
"""Most public peers asked: two reveal a NAT that maps each destination to another port, a third outvotes a liar."""
MIRROR_SECONDS = 2.0
"""Longest wait for an answer: a connection and a round trip."""
AGAIN_SECONDS = 0.1
"""First pause after a refusal: the other side, or its router, may not expect this peer yet. Each pause is twice the one
before, so a member that names a third party's address causes few packets there."""
MAX_ARRIVED = 4
"""Most connections that came from outside and are not used yet; the oldest is closed."""

_PASSING = {
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTUNREACH,
    errno.ENOTCONN,
    errno.EADDRNOTAVAIL,
    errno.EADDRINUSE,
}
"""Errors that may pass; the last two occur while the same connection is being made from the other end."""

_log = logging.getLogger(__name__)

_Message = TypeVar("_Message", Candidates, Probe, Go)


class Schedule:
    """Schedules holes to the peers met in rounds that cannot be dialled, and keeps the results. Sans IO."""

    def __init__(self, met: LruDict[str, float]) -> None:
        """`met` tells when a round with a peer began last; the latest is its last."""
        self._met = met
        self._under_way: set[str] = set()
        self._results: LruDict[str, Failure] = LruDict(MAX_RESULTS)

    def due(self, now: float, lacking: Callable[[str], bool]) -> list[str]:
        """Return the peers to punch to now, the last met first; `lacking` tells whether a peer needs a hole."""
        first = Failure("", now + PATIENCE_SECONDS, 0.0)
        wanted = (peer for peer in reversed(self._met) if not self.refusal(peer, now) and lacking(peer))
        found = [peer for peer in wanted if self._results.setdefault(peer, first).retry <= now]
        return found[: max(0, MAX_AT_ONCE - len(self._under_way))]

    def began(self, peer: str) -> None:
        """Note that a punch with a peer is under way."""
        self._under_way.add(peer)

    def ended(self, peer: str, failure: str, now: float) -> None:
        """Note that a punch is over; `failure` says why it opened no channel, and is empty if it did."""
        before = self._results.get(peer)
        pause = before.pause if before else 0.0
        pause = backoff(pause, FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS) if failure else 0.0
        self._results[peer] = Failure(failure, now + (pause or FIRST_RETRY_SECONDS), pause)
        self._under_way.discard(peer)

    def refusal(self, peer: str, now: float) -> str:
        """Return why this peer refuses a punch that `peer` begins; empty if it takes part."""
        if now >= self._met.get(peer, float("-inf")) + WANTED_SECONDS:
            return "it has met this peer in no round of late"
        return "a punch between the two is under way" if peer in self._under_way else ""

    def failure(self, peer: str) -> str:
        """Return why the last punch with `peer` failed; empty if it succeeded, or no punch has ended."""
        return self._results[peer].reason if peer in self._results else ""


class SharedPort:
    """A local TCP port, bound at first use, from which several connections leave, so that a NAT maps them to one port.

    It is not the direct listener's port. To share that port, the listener too would need SO_REUSEPORT. Then a second
    daemon told to listen there would not be refused, but start and take half of the listener's connections.
    """

    def __init__(self) -> None:
        self._number = 0
        self._acceptor: Acceptor | None = None
        self._held: list[socket.socket] = []
        self._arrived: dict[str, socket.socket] = {}
        self._arrival = asyncio.Event()

    async def measure(self, mirrors: Mapping[Place, bytes]) -> Candidates:
        """Ask public peers, each by its question, where they see this port's connections come from.

        The connections to those peers stay open, which keeps the router's mapping. Raises OSError if no peer answers,
        or no port can be bound.
        """
        # The first connection binds the port, so all mirrors must have the same IP version.
        first = next(iter(mirrors), ("", 0))
        alike = [place for place in mirrors if (":" in place[0]) == (":" in first[0])]
        answers = await asyncio.gather(*(self._ask(place, mirrors[place]) for place in alike[:MIRRORS]))
        told = [answer for answer in answers if answer is not None]
        return candidates.judge([seen for seen, _ in told], [inside for _, inside in told])

    async def connect(self, place: Place) -> socket.socket:
        """Open a connection from both ends at once: the peer at `place` connects to this port too. Until cancelled.

        This side also listens, for first packets that come while it does not dial: without a router between the two,
        its kernel would refuse them. Raises OSError if no connection is possible.
        """
        if self._acceptor is None:
            self._acceptor = Acceptor(self._bound(place[0]), MAX_ARRIVED, self._take)
        pause = AGAIN_SECONDS
        while True:
            self._arrival.clear()
            connection = self._arrived.pop(place[0], None) or await self._dial(place)
            if connection is not None:
                return connection
            await sleep_until(self._arrival, pause)
            pause *= 2

    def close(self) -> None:
        """Close all connections held here, and the listener; idempotent."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        for connection in (*self._held, *self._arrived.values()):
            connection.close()
        self._held, self._arrived = [], {}

    async def _ask(self, place: Place, question: bytes) -> tuple[Place, Place] | None:
        """Return the address that `place` sees for a connection, and the connection's true local address."""
        connection = self._bound(place[0])
        self._held.append(connection)
        try:
            async with asyncio.timeout(MIRROR_SECONDS):
                await asyncio.get_running_loop().sock_connect(connection, place)
                return await ask_origin(connection, question), connection.getsockname()[:2]
        except OSError as error:
            _log.debug("%s does not tell where connections come from: %s", shown(place), said(error))
            return None

    async def _dial(self, place: Place) -> socket.socket | None:
        """Return a connection; None if it was refused."""
        try:
            with streams.closed_on_failure(self._bound(place[0])) as connection:
                await asyncio.get_running_loop().sock_connect(connection, place)
                if connection.getsockname() == connection.getpeername():
                    raise ConnectionError("that is this port itself")
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            return None
        return connection

    def _take(self, connection: socket.socket, address: Place) -> None:
        # Keyed by host alone: if the other side's router draws ports, the port differs from the one named.
        full = address[0] not in self._arrived and len(self._arrived) >= MAX_ARRIVED
        before = self._arrived.pop(next(iter(self._arrived)) if full else address[0], None)
        if before is not None:
            before.close()
        self._arrived[address[0]] = connection
        self._arrival.set()

    def _bound(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with streams.closed_on_failure(socket.socket(family, socket.SOCK_STREAM)) as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            connection.bind(("", self._number))
            self._number = connection.getsockname()[1]
        return connection


OpenChannel = Callable[[SharedPort, Place], Awaitable[FramedChannel]]
"""Connects from a port to a place and shakes hands there, until cancelled; raises OSError if that fails."""


class Attempt:
    """One side of one attempt to open a channel through a hole.

        begins                                        the other side
        measures, Candidates  ------------------->    measures
                              <-------------------    Candidates
        Probe                 ------------------->
                              <-------------------    Probe
        Go                    ------------------->    tries at once
        tries half the way there and back later

    The last four lines repeat until a channel opens. Each time the round trip is measured anew, so that both routers'
    first packets cross (libp2p's DCUtR; its CONNECT is our Candidates, its SYNC our Go). `channel` is the opened
    channel, `tries` counts the tries begun.
    """

    def __init__(
        self, stream: Stream, begins: bool, mirrors: Mapping[Place, bytes], opens: OpenChannel
    ) -> None:
        """`mirrors` are direct listeners of public peers; `begins` is True on the side that speaks first."""
        self.channel: FramedChannel | None = None
        self.tries = 0
        self._stream = stream
        self._begins = begins
        self._mirrors = mirrors
        self._opens = opens
        self._port = SharedPort()
        self._opened = asyncio.Event()
        self._trying = TaskSet()
        self._targets: tuple[Place, ...] = ()
        self._obstacle = ""
        self._failures: dict[Place, str] = {}

    async def run(self) -> str:
        """Return why no channel was opened; empty if one was."""
        try:
            await self._agree()
            reason = await self._try()
        except StreamClosed as error:
            reason = f"the relayed stream has ended: {error}"
        except (OSError, Malformed) as error:
            reason = said(error)
            with contextlib.suppress(StreamClosed):
                await self._say(End(reason[: candidates.MAX_REASON_CHARACTERS]))
            # The other side does not learn what is found here: it may have named places in order to explore them.
            reason = "; ".join((reason, *self._failures.values()))
        finally:
            await self._trying.stop()
            self._port.close()
        # A channel that opened at the last moment counts too.
        return "" if self.channel is not None else reason

    async def _agree(self) -> None:
        """Find places that are worth trying."""
        if self._begins:
            own = await self._port.measure(self._mirrors)
            await self._say(own)
            theirs = await self._hear(Candidates)
        else:
            theirs = await self._hear(Candidates)
            own = await self._port.measure(self._mirrors)
        self._targets, self._obstacle = candidates.targets(own, theirs), candidates.obstacle(own, theirs)
        if not self._targets:
            raise ConnectionError(self._obstacle or "the two have no kind of address in common")
        if not self._begins:
            await self._say(own)

    async def _try(self) -> str:
        """Try until a channel opens; return why none did.

        Neither words nor the length of a try tell the other side what is found here.
        """
        while self.channel is None and self.tries < MAX_TRIES:
            await self._get_in_step()
            await self._trying.stop()
            self.tries += 1
            for place in self._targets:
                self._trying.spawn(self._connect(place))
            await sleep_until(self._opened, TRY_SECONDS)
        sought = " or ".join(f"{host} port {port}" for host, port in self._targets)
        found = "; ".join(self._failures.values()) or f"nobody answered at {sought}"
        return "; ".join(filter(None, (f"{found}, in {self.tries} tries", self._obstacle)))

    async def _get_in_step(self) -> None:
        """Return at about the moment at which the other side does."""
        if self._begins:
            asked = time.monotonic()
            await self._say(Probe())
            await self._hear(Probe)
            lead = min((time.monotonic() - asked) / 2, MAX_LEAD_SECONDS)
            await self._say(Go())
            await asyncio.sleep(lead)
        else:
            await self._hear(Probe)
            await self._say(Probe())
            await self._hear(Go)

    async def _connect(self, place: Place) -> None:
        try:
            channel = await self._opens(self._port, place)
        except OSError as error:
            self._failures[place] = f"{shown(place)}: {said(error)}"
            return
        if self.channel is None:
            self.channel = channel
            self._opened.set()
        else:
            channel.close()

    async def _say(self, message: Message) -> None:
        await streams.send_message(self._stream, candidates.encode(message))

    async def _hear(self, kind: type[_Message]) -> _Message:
        """Return the other side's next message; raises ConnectionError if it is of another kind, or does not come."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                message = candidates.decode(
                    await streams.receive_message(self._stream, candidates.MAX_MESSAGE_BYTES)
                )
        except TimeoutError:
            raise ConnectionError(f"the other side does not answer within {ANSWER_SECONDS:.0f} s") from None
        if isinstance(message, End):
            raise ConnectionError(f"the other side gave up: {printable(message.reason)}")
        if not isinstance(message, kind):
            raise ConnectionError(f"the other side said {type(message).__name__} out of turn")
        return message


class Puncher:
    """Punches holes by the `schedule`, and has the channels used."""

    def __init__(self, link: P2pdClient, dialer: Dialer, direct: DirectTransport, reach: Reach) -> None:
        self._link = link
        link.accept(candidates.PUNCH_PROTOCOL, MAX_ANSWERED, self._answer)
        self._reach = reach
        self._dialer = dialer
        self._direct = direct
        self.schedule = Schedule(link.gate.met)
        self._limit = RateLimit(CALLS_PER_SECOND, BURST)
        self._tries = RateLimit(TRIES_PER_SECOND, TRIES_BURST)
        self._tasks = TaskSet()

    async def run(self) -> None:
        """Punch holes until cancelled."""
        try:
            while True:
                if self._link.attached and self._hidden:
                    for peer in self.schedule.due(time.monotonic(), self._begins):
                        self.schedule.began(peer)
                        self._tasks.spawn(self._begin(peer))
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            await self._tasks.stop()

    @property
    def _hidden(self) -> bool:
        """True if this peer listens and cannot be dialled."""
        return self._reach.hidden and bool(self._direct.port)

    def _begins(self, peer: str) -> bool:
        """Tell whether this side must begin a punch with `peer`, and has no channel with it yet."""
        return self._direct.peer < peer and not self._direct.channels.having(peer)

    async def _begin(self, peer: str) -> None:
        try:
            await self._dialer.reach(peer)
            with contextlib.closing(
                await self._link.open_stream(peer, candidates.PUNCH_PROTOCOL, OPEN_SECONDS)
            ) as stream:
                await self._punch(peer, stream, begins=True)
        except ConnectionError as error:
            self._end(peer, f"no stream to it can be opened: {error}")

    async def _answer(self, peer: str, relayed: bool, stream: Stream) -> None:
        refusal = self._refusal(peer)[: candidates.MAX_REASON_CHARACTERS]
        if refusal:
            await streams.send_message(stream, candidates.encode(End(refusal)))
            async with asyncio.timeout(HANG_UP_SECONDS):
                await stream.wait_readable()
            return
        self.schedule.began(peer)
        await self._punch(peer, stream, begins=False)

    def _refusal(self, peer: str) -> str:
        """Return why this peer refuses a punch that `peer` begins; empty if it takes part."""
        now = time.monotonic()
        if not self._limit.allow(peer, now):
            return "it is asked too often"
        if not self._hidden:
            return "it is not behind a NAT, as far as it knows"
        if peer > self._direct.peer:
            return "the other peer has to start this punch"
        return self.schedule.refusal(peer, now)

    async def _punch(self, peer: str, stream: Stream, begins: bool) -> None:
        """Punch a hole to `peer`, and note the result."""

        async def connect(port: SharedPort, place: Place) -> FramedChannel:
            if not self._tries.allow(place[0], time.monotonic()):
                raise ConnectionError("that address is tried too often")
            connection = await port.connect(place)
            return await self._direct.punch(peer, connection, place, dialled=begins)

        attempt, failure = Attempt(stream, begins, self._reach.mirrors, connect), "it was broken off"
        try:
            failure = await attempt.run()
        finally:
            self._end(peer, failure)
        if attempt.channel is not None:
            self._direct.use(attempt.channel)
            _log.info("a hole to %s is punched, at try %d", peer, attempt.tries)

    def _end(self, peer: str, failure: str) -> None:
        if failure:
            _log.info("no hole to %s: %s", peer, printable(failure))
        self.schedule.ended(peer, printable(failure), time.monotonic())
