"""Direct channels with members of a group, as `equipoise.averaging.ports.DirectTransport` asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence

from equipoise.dht.address import ListenAddress, block_of
from equipoise.dht.dialpolicy import DialPolicy, Place, private_networks
from equipoise.dht.direct import handshake
from equipoise.dht.direct.credential import Allowlist, issue
from equipoise.dht.direct.errors import Refusals, Refused, Why
from equipoise.dht.direct.handshake import PREFACE_BYTES, Preface, parse_preface
from equipoise.dht.direct.listener import (
    ORIGIN_MAGIC,
    ORIGIN_QUESTION,
    Listener,
    WaitingRoom,
    endpoints,
    origin_answer,
)
from equipoise.dht.direct.sockets import connect, keep_alive, receive_exactly, said, shown, tune
from equipoise.dht.direct.tls import make_context
from equipoise.dht.gate import Gate
from equipoise.dht.identity import Identity
from equipoise.dht.limits import Handshakes
from equipoise.dht.options import DEFAULT_LAYER, Layer
from equipoise.dht.state import DirectStatus
from equipoise.dht.streams import Stream
from equipoise.dht.transport import FramedChannel, Handler, OpenChannels
from equipoise.limits import LruDict
from equipoise.tasks import TaskSet

OPEN_SECONDS = 10.0
"""Longest time to wait for a turn, dial and shake hands, over all of a peer's addresses."""
MAX_OPENING = 8
"""Most peers that this one dials at once, half of them for peers met in rounds: a handshake costs each end 7 ms of a
processor. Where twenty daemons of a machine met at once and opened all at once, all handshakes took too long, and began
anew, for minutes."""
HANDSHAKE_SECONDS = 10.0
"""Longest handshake of a peer that dials this one, from its first byte to its greeting."""
ADMIT_SECONDS = 1.5
"""Longest wait of a dialling peer for its admission, less than its patience (`handshake.SILENT_SECONDS`). That peer may
get the round's manifest before this peer does."""
MAX_FAILURES = 1024
"""Most peers remembered that could not be dialled, each with the reason: as many as are admitted."""


class Turns:
    """Dials take turns: at most `MAX_OPENING` at once, and at most half as many to peers that were never met."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(MAX_OPENING)
        self._strangers = asyncio.Semaphore(MAX_OPENING // 2)

    @contextlib.asynccontextmanager
    async def turn(self, met: bool) -> AsyncIterator[None]:
        """Wait for a turn, and hold it within the context; `met` for a peer met in a round."""
        async with contextlib.nullcontext() if met else self._strangers, self._all:
            yield


class DirectTransport:
    """Opens and accepts direct channels with admitted peers; needs nothing of libp2p.

    Attributes:
        peer: PeerID of this peer.
        channels: The open channels.
    """

    def __init__(
        self,
        identity: Identity,
        listen: Sequence[ListenAddress] = (),
        layer: Layer = DEFAULT_LAYER,
        policy: DialPolicy | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Make the TLS context; channels are with peers that the `gate` admits.

        Without `listen` addresses no peer can dial this one (client mode). `layer` carries the frames once both sides
        have proved their PeerIDs. `policy` decides which addresses of credentials are dialled, and how often.
        """
        self.peer = identity.peer
        self._layer = layer
        self._policy = policy or DialPolicy(private_networks)
        self._context = make_context(identity)
        self._allowlist = Allowlist()
        self._listener = Listener(listen, self._accept)
        self._refusals = Refusals()
        self._gate = gate or Gate()
        self._waiting = WaitingRoom()
        self.channels = OpenChannels()
        self._failures: LruDict[str, str] = LruDict(MAX_FAILURES)
        self._handshakes = Handshakes(self._gate.met)
        self._turns = Turns()
        self._tasks = TaskSet()

    @property
    def dialable(self) -> bool:
        """True if others can open channels to this peer."""
        return self._listener.wanted

    @property
    def credential(self) -> bytes:
        """Where others reach this peer; at most `MAX_CREDENTIAL_BYTES`, and never empty."""
        return issue(self._listener.told)

    def status(self) -> DirectStatus:
        """Return a snapshot, without waiting."""
        return DirectStatus(
            channel=self._layer,
            listening=tuple(shown(one) for one in self._listener.told or self._listener.bound),
            channels=len(self.channels),
            refused=dict(self._refusals.counts),
            last_refusal=self._refusals.last,
        )

    def admit(self, peer: str, credential: bytes) -> None:
        """Allow channels with `peer` from now on; raises ValueError with the reason if the credential is malformed."""
        try:
            self._allowlist.admit(peer, credential)
        except Refused as error:
            self._refuse(error.why, str(error))
            raise ValueError(str(error)) from None

    def meet(self, peer: str) -> None:
        """Note that a round with `peer` begins."""
        self._gate.met[peer] = time.monotonic()

    def reaches(self, peer: str) -> bool:
        """Tell whether `peer` was admitted, and names addresses."""
        return bool(self._allowlist.get(peer))

    def failure(self, peer: str) -> str:
        """Return why the last dial of `peer` failed; empty if a channel opened since, or `peer` cannot be dialled."""
        return self._failures.get(peer, "") if self.reaches(peer) else ""

    @property
    def port(self) -> int:
        """A TCP port on which this peer listens; 0 if it does not listen."""
        return next((port for _, port in self._listener.bound), 0)

    def serve(self, handler: Handler | None) -> None:
        """Run `handler` in a task of its own for every accepted channel; None stops accepting."""
        self.channels.handler = handler

    def start(self, wish: int = 0) -> None:
        """Begin to listen; a port that is not named becomes `wish` if that is free. Raises as `Listener.start`."""
        self._listener.start(wish)
        self.tell(host for host, _ in self._listener.bound)

    def tell(self, hosts: Iterable[str], *, forwarded: bool = False) -> None:
        """Tell others that this machine, or one that forwards ports here, is reached at these hosts, best first."""
        self._listener.told = endpoints(hosts, self._listener.bound, forwarded=forwarded)

    async def stop(self) -> None:
        """Stop listening, close every channel, end every handler; idempotent."""
        self._listener.stop()
        self.channels.close()
        await self._tasks.stop()

    async def open(self, peer: str) -> FramedChannel:
        """Open a channel to `peer` within `OPEN_SECONDS`; raises ConnectionError with the reason if that fails."""
        failures = []
        try:
            async with asyncio.timeout(OPEN_SECONDS), self._turns.turn(peer in self._gate.met):
                await self._gate.present(peer)
                self.channels.check_room(peer)
                for host, port in self._allowlist.current(peer):
                    try:
                        return self._enter(peer, await self._try(peer, host, port))
                    except OSError as error:
                        failures.append(f"{shown((host, port))}: {said(error)}")
        except TimeoutError:
            failures.append(f"no channel within {OPEN_SECONDS:.0f} s")
        except ConnectionError as error:
            failures.append(str(error))
        self._gate.forget(peer)  # It may have been started again, and know this peer no more.
        reason = self._failures[peer] = "; ".join(failures) or "it listens nowhere"
        raise ConnectionError(f"cannot open a direct channel to {peer}: {reason}")

    async def _try(self, peer: str, host: str, port: int) -> Stream:
        place, failure = (host, port), "it was broken off"
        refusal = self._policy.begin(peer, place, time.monotonic())
        if refusal is not None:
            raise ConnectionError(refusal.reason)
        try:
            connection = await connect(host, port, self._policy.permits)
            stream = await self._claim(connection, peer, place)
            failure = ""
            return stream
        except OSError as error:
            failure = said(error)
            raise
        finally:
            self._policy.end(peer, place, time.monotonic(), failure)

    def _enter(self, peer: str, stream: Stream) -> FramedChannel:
        self._failures.pop(peer, None)
        return self.channels.enter(peer, stream)

    async def punch(
        self, peer: str, connection: socket.socket, address: Place, *, dialled: bool
    ) -> FramedChannel:
        """Turn a connection that both sides have opened at once into a channel, as if one side had dialled the other.

        Takes over the non-blocking connection with `peer` at `address`. `dialled` says whether this side counts as
        dialling. Raises ConnectionError if another peer is there, or `peer` was not admitted or ends the connection.
        """
        try:
            keep_alive(connection)
            self._allowlist.current(peer)
            if dialled:
                self.channels.check_room(peer)
                return self._enter(peer, await self._claim(connection, peer, address))
            preface = parse_preface(
                self._gate.unlock(self.peer, await receive_exactly(connection, PREFACE_BYTES))
            )
            if preface.dialler != peer:
                raise Refused("other peer", f"{preface.dialler} is where {peer} was expected")
            return await self._introduce(connection, preface, block_of(address[0]))
        finally:
            connection.close()

    def use(self, channel: FramedChannel) -> None:
        """Have the handler take a channel through a hole, at both ends."""
        channel.punched = True
        self._tasks.spawn(self.channels.handle(channel))

    async def _claim(self, connection: socket.socket, peer: str, address: Place) -> Stream:
        """Send the preface on a connection that this peer has opened, and prove its PeerID."""
        preface = Preface(self._layer, self.peer, peer)
        try:
            tune(connection)
            await asyncio.get_running_loop().sock_sendall(connection, self._gate.lock(peer, preface.encode()))
            return await handshake.secure(connection, self._context, preface, dialler=True)
        except Refused as error:
            if error.why == "impostor":
                self._refuse(error.why, f"{peer} at {shown(address)}: {error}")
            raise
        finally:
            connection.close()

    def question(self, peer: str) -> bytes:
        """Return the question for one's own address that the listener of `peer` answers."""
        return self._gate.lock(peer, ORIGIN_QUESTION)

    def _accept(self, connection: socket.socket, address: Place) -> None:
        task = self._tasks.spawn(self._welcome(connection, address))
        task.add_done_callback(lambda _: connection.close())
        evicted = self._waiting.enter(task, address[0])
        if evicted is not None:
            self._refuse("too many", f"more than {len(self._waiting)} connections without a proven peer")
            evicted.cancel()

    async def _welcome(self, connection: socket.socket, address: Place) -> None:
        task, host = asyncio.current_task(), address[0]
        assert task is not None
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                opening = self._gate.unlock(self.peer, await receive_exactly(connection, PREFACE_BYTES))
                if opening.startswith(ORIGIN_MAGIC):
                    await asyncio.get_running_loop().sock_sendall(connection, origin_answer(*address))
                    return
                if self.channels.handler is None:
                    return
                channel = await self._introduce(connection, parse_preface(opening), block_of(host))
        except TimeoutError:
            self._refuse("timeout", f"{host} did not prove who it is in {HANDSHAKE_SECONDS:.0f} s")
            return
        except OSError as error:
            self._refuse(getattr(error, "why", "went away"), f"{host}: {said(error)}")
            return
        finally:
            self._waiting.leave(task)
        await self.channels.handle(channel)

    async def _introduce(self, connection: socket.socket, preface: Preface, block: str) -> FramedChannel:
        tune(connection)
        if preface.acceptor != self.peer:
            raise Refused("other peer", f"{preface.dialler} wants to reach {preface.acceptor}")
        await self._allowlist.expect(preface.dialler, ADMIT_SECONDS)
        if not self._handshakes.admits(block, time.monotonic()):
            raise Refused("too many", "more handshakes than this peer has time for")
        stream = await handshake.secure(connection, self._context, preface, dialler=False)
        try:
            self.channels.check_room(preface.dialler)
        except ConnectionError as error:
            stream.close()
            raise Refused("too many", str(error)) from None
        self._handshakes.note(block, preface.dialler)
        return self._enter(preface.dialler, stream)

    def _refuse(self, why: Why, text: str) -> None:
        self._refusals.note(why, text, time.monotonic())
