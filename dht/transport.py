"""Frames between peers over libp2p streams, as `equipoise.averaging.ports.Transport` and `Channel` ask for them.

On the wire a frame is two big-endian u32, the lengths of header and body, then both. PeerIDs are authenticated by
libp2p's handshake, in p2pd.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable

from equipoise.dht.dialer import Dialer
from equipoise.dht.identity import public_key_of
from equipoise.dht.p2pd_client import P2pdClient, P2pdGone
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.dht.streams import UNCAPPED, Buffer, BytesRefused, Stream, StreamClosed
from equipoise.limits import MAX_BODY_BYTES, MAX_HEADER_BYTES

STREAM_PROTOCOL = f"/equipoise/{PROTOCOL_VERSION}"
OPEN_SECONDS = 5.0
"""Longest time to dial, negotiate and open: the port's own timeout."""
RETRY_SECONDS = 0.1
"""Time between two attempts to open a stream while no p2pd is there. Its supervisor starts one in 0.4 s."""
MAX_CHANNELS_PER_PEER = 8
"""One is usual, for all runs together, two if both sides dial at once: the rest is room for those that the other end
has given up already. One more is refused."""
MAX_CHANNELS = 512
"""A group has at most 64 members; several groups at once stay below. A stream costs a descriptor here and one in p2pd,
a direct channel a descriptor and up to 2.5 MB."""

_PREFIX = struct.Struct("!II")

_log = logging.getLogger(__name__)

Place = Callable[[bytes, int], memoryview]
Handler = Callable[["FramedChannel"], Awaitable[None]]
"""Has an accepted channel, which is closed when the handler ends."""


class FramedChannel:
    """One stream of frames (`averaging.ports.Channel`).

    `peer` is the PeerID of the other end; a channel that is `punched` leads through a hole in both NATs. A `send` or
    `receive` that is cancelled in the middle of a frame closes the channel; before a frame has begun it does not.
    """

    def __init__(self, peer: str, stream: Stream, closed: Callable[[FramedChannel], None]) -> None:
        self.peer = peer
        self.punched = False
        self._stream = stream
        self._closed = closed
        self._sending = asyncio.Lock()
        self._prefix = bytearray(_PREFIX.size)

    @property
    def rtt(self) -> float:
        """Round-trip time in seconds; 0 where that is not known."""
        return self._stream.rtt

    @property
    def delivered(self) -> int:
        """Bytes that the other end's kernel has acknowledged so far; where that cannot be told, that left here."""
        return self._stream.delivered

    @property
    def in_flight(self) -> int:
        """Bytes that left this process, and are not acknowledged."""
        return self._stream.in_flight

    @property
    def received(self) -> int:
        """Bytes that have come in so far, those of a record that is not complete included."""
        return self._stream.arrived

    async def send(self, header: bytes, body: Buffer = b"") -> None:
        """Send one frame; raises ValueError if the header or body exceeds its maximum.

        Raises ConnectionError if the channel is closed or broken, or the peer does not read.
        """
        header_size, body_size = len(header), memoryview(body).nbytes
        if header_size > MAX_HEADER_BYTES or body_size > MAX_BODY_BYTES:
            raise ValueError(
                f"expected a header of at most {MAX_HEADER_BYTES} and a body of at most {MAX_BODY_BYTES} bytes, "
                f"got {header_size} and {body_size}"
            )
        async with self._sending:
            try:
                await self._stream.send(_PREFIX.pack(header_size, body_size) + header, body)
            except StreamClosed as error:
                raise self._broken("send to", error) from None
            except BaseException:
                self.close("a send was abandoned within a frame")
                raise

    async def receive(self, place: Place) -> tuple[bytes, memoryview]:
        """Receive one frame into the buffer that `place` gives for its body; an error of `place` closes the channel.

        Raises ConnectionError if the channel is closed or broken, or a length exceeds its maximum.
        """
        try:
            await self._stream.wait_readable()
        except StreamClosed as error:
            raise self._broken("receive from", error) from None
        try:
            return await self._receive(place)
        except StreamClosed as error:
            raise self._broken("receive from", error) from None
        except BaseException:
            # Bytes of a frame may have moved: nothing after them can be understood.
            self.close("a receive was abandoned within a frame")
            raise

    async def _receive(self, place: Place) -> tuple[bytes, memoryview]:
        stream = self._stream
        await stream.receive_into(memoryview(self._prefix))
        header_size, body_size = _PREFIX.unpack(self._prefix)
        if header_size > MAX_HEADER_BYTES or body_size > MAX_BODY_BYTES:
            raise BytesRefused(
                f"it announces a frame of {header_size} + {body_size} bytes, above the maximum"
            )
        if not (header := stream.read_ahead(header_size)):
            place_of_header = bytearray(header_size)
            await stream.receive_into(memoryview(place_of_header))
            header = bytes(place_of_header)
        if not body_size:
            return header, memoryview(b"")
        view = place(header, body_size).cast("B")
        if len(view) != body_size:
            raise ValueError(f"expected a buffer of {body_size} bytes for the body, got {len(view)}")
        await stream.receive_into(view)
        return header, view

    def close(self, why: str = "closed by this peer") -> None:
        """Close the stream; idempotent."""
        if not self._stream.closed:
            self._stream.close(why)
            self._closed(self)

    def _broken(self, what: str, error: StreamClosed) -> StreamClosed:
        if isinstance(error, BytesRefused):
            _log.info("dropped a channel with %s: %s", self.peer, error)
        self.close(str(error))
        return StreamClosed(f"{what} {self.peer}: {error}")


class OpenChannels:
    """The open channels of one transport; `handler` has those that other peers open, without one none is accepted.

    What the channels carry stays within the `caps`.
    """

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.caps = UNCAPPED
        self._channels: set[FramedChannel] = set()

    def __len__(self) -> int:
        return len(self._channels)

    def having(self, peer: str) -> list[FramedChannel]:
        """Return those with `peer`."""
        return [channel for channel in self._channels if channel.peer == peer]

    def check_room(self, peer: str) -> None:
        """Check that one more channel with `peer` stays within bounds; raises ConnectionError if it does not."""
        if len(self.having(peer)) >= MAX_CHANNELS_PER_PEER:
            raise ConnectionError(f"{MAX_CHANNELS_PER_PEER} channels with {peer} are open, the maximum")
        if len(self._channels) >= MAX_CHANNELS:
            raise ConnectionError(f"{MAX_CHANNELS} channels are open, the maximum")

    def enter(self, peer: str, stream: Stream) -> FramedChannel:
        """Make a stream a channel, counted until it is closed."""
        stream.caps = self.caps
        channel = FramedChannel(peer, stream, self._channels.discard)
        self._channels.add(channel)
        return channel

    async def handle(self, channel: FramedChannel) -> None:
        """Let the handler, if there is one, have a channel, and close that afterwards."""
        try:
            if self.handler is not None:
                await self.handler(channel)
        except ConnectionError as error:
            _log.debug("%s", error)
        except Exception:
            _log.exception("the handler of a channel from %s failed", channel.peer)
        finally:
            channel.close()

    def close(self) -> None:
        """Close all of them, and accept no other."""
        self.handler = None
        for channel in list(self._channels):
            channel.close()


class Libp2pTransport:
    """Opens and accepts channels of `peer` through p2pd (`averaging.ports.Transport`)."""

    def __init__(self, peer: str, dialable: Callable[[], bool], link: P2pdClient, dialer: Dialer) -> None:
        self.peer = peer
        self._dialable = dialable
        self._link = link
        self._dialer = dialer
        link.accept(STREAM_PROTOCOL, MAX_CHANNELS, self._welcome)
        self.channels = OpenChannels()

    @property
    def dialable(self) -> bool:
        """True if others can open channels to this peer."""
        return self._dialable()

    async def open(self, peer: str) -> FramedChannel:
        """Open a channel to `peer` within `OPEN_SECONDS`; raises ConnectionError, which says why, if none can be."""
        self.channels.check_room(peer)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                stream = await self._open_stream(peer)
        except TimeoutError:
            raise ConnectionError(f"cannot reach {peer}: no answer within {OPEN_SECONDS:.0f} s") from None
        except ConnectionError as error:
            raise ConnectionError(f"cannot reach {peer}: {error}") from error
        return self.channels.enter(peer, stream)

    def serve(self, handler: Handler | None) -> None:
        """Run `handler` in a task of its own for every accepted channel; None stops accepting."""
        self.channels.handler = handler

    async def _open_stream(self, peer: str) -> Stream:
        # While another p2pd starts, the other peer is not to be taken for lost.
        while True:
            try:
                await self._dialer.reach(peer)
                return await self._link.open_stream(peer, STREAM_PROTOCOL, OPEN_SECONDS)
            except P2pdGone:
                await asyncio.sleep(RETRY_SECONDS)

    async def _welcome(self, peer: str, relayed: bool, stream: Stream) -> None:
        public_key_of(peer)
        self.channels.check_room(peer)
        await self.channels.handle(self.channels.enter(peer, stream))
