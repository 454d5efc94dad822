"""The needs of `averaging`: a transport of frames, and a directory of peers.

Both are structural Protocols. `equipoise.dht` implements them over libp2p, tests in memory;
`equipoise.peer` wires them in. A frame is a small header (a msgpack control message) and an optional
body (bulk values). Peers are named by their PeerID in base58, a `str`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from equipoise.limits import Candidate, Stand

Buffer = bytes | bytearray | memoryview

Place = Callable[[bytes, int], memoryview]
"""Given a frame's header and its body's size, return the writable buffer of exactly that size to receive the body
into, or raise `FrameRefused`. It is called before memory is taken or the body is read."""


class FrameRefused(Exception):
    """The receiver refuses this frame (unknown kind, malformed, wrong size); the channel is closed.

    The receiver ignores frames of a round that it does not know, or of which the sender is no member.
    """


def parser(kind: Any, name: str, error: type[Exception] = FrameRefused) -> Callable[[Any], Any]:
    """Return a function that parses and checks messages of one kind from other processes; `name` is for people.

    It raises an `error` for bytes that are no such message, or that hold a value out of its bounds.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def parse(data: Any) -> Any:
        try:
            return decode(data)
        # msgspec does not wrap the last two: deep nesting in a skipped field, and bytes that are no valid text.
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as why:
            raise error(f"expected {name}, got {len(data)} bytes that do not decode: {why}") from why

    return parse


class Channel(Protocol):
    """An ordered, reliable, bidirectional stream of frames to one authenticated peer."""

    @property
    def peer(self) -> str:
        """PeerID of the other end, authenticated by the transport."""

    @property
    def punched(self) -> bool:
        """Whether it leads through a hole in both NATs: the transport hands it to the handler at both ends."""

    @property
    def rtt(self) -> float:
        """Round-trip time in seconds; 0 if unknown."""

    @property
    def delivered(self) -> int:
        """Bytes that have reached the other end's kernel so far; if that is unknown, bytes that left this process."""

    @property
    def in_flight(self) -> int:
        """Bytes that left this process, and have not reached the other end's kernel, as far as that is known."""

    @property
    def received(self) -> int:
        """Bytes that have come in so far, incomplete frames included."""

    async def send(self, header: bytes, body: Buffer = b"") -> None:
        """Send one frame; returns when the transport has taken it (backpressure).

        Concurrent callers are serialised, frame by frame.

        Raises:
            ConnectionError: The channel is closed or broken; the message says why.
            ValueError: The header or body exceeds its maximum.
        """

    async def receive(self, place: Place) -> tuple[bytes, memoryview]:
        """Receive one frame: (header, body); an empty body does not call `place`.

        Raises:
            ConnectionError: The channel is closed or broken, or a length exceeds its maximum.
            FrameRefused: `place` refused the frame.
        """

    def close(self) -> None:
        """Close the stream; idempotent. A pending `receive` raises ConnectionError at both ends."""


class Transport(Protocol):
    """Opens channels to peers and accepts theirs."""

    @property
    def peer(self) -> str:
        """PeerID of this peer."""

    @property
    def dialable(self) -> bool:
        """True if others can open channels to this peer (False in client mode)."""

    async def open(self, peer: str) -> Channel:
        """Open a channel to `peer`, bounded by the transport's own timeout.

        Raises:
            ConnectionError: The peer cannot be reached; the message names it and says why.
        """

    def serve(self, handler: Callable[[Channel], Awaitable[None]] | None) -> None:
        """Run `handler` in a task of its own for every accepted channel; None stops accepting."""


class DirectTransport(Transport, Protocol):
    """Fast channels straight between peers, with admitted peers only.

    Members of this peer's groups are admitted, and peers that fetch a state from it or give it one. An admission is to
    the daemon, not to one round, and may last for hours. So each frame is checked: its sender must be a member of the
    round that it names.
    """

    @property
    def credential(self) -> bytes:
        """The bytes by which others reach this peer; at most `MAX_CREDENTIAL_BYTES`, and never empty."""

    def admit(self, peer: str, credential: bytes) -> None:
        """Accept channels from `peer`, and open them to it, from now on.

        Raises:
            ValueError: The credential is malformed; says how.
        """

    def meet(self, peer: str) -> None:
        """Note that a round with `peer` begins: a channel with it is worth some effort, if it was admitted."""

    def reaches(self, peer: str) -> bool:
        """True if `peer` was admitted and says where it listens."""


class Directory(Protocol):
    """The peers that take part in a run, as far as this peer knows.

    Attributes:
        carry: Sends bytes to a peer if a session with it is open, and returns whether one is. A message costs a
            twentieth there of what a call through libp2p costs.
    """

    carry: Callable[[str, bytes], bool]

    async def announce(self, run: str, stand: Stand) -> None:
        """Publish how this peer stands in the run named `run`; renewed until withdrawn.

        Peers of one name with different `spec` see each other, so that each can tell its user why they do not meet.

        A missing network is not an error: the record is published once there is a network.
        """

    def receive(self, peer: str, data: bytes) -> None:
        """Take the bytes that another peer's `carry` has sent; the peer is authenticated, the bytes are not checked."""

    async def withdraw(self, run: str) -> None:
        """Stop announcing this peer in `run`, and let the record expire at once if possible."""

    async def peers(self, run: str) -> Sequence[Candidate]:
        """The verified, unexpired records of `run`, this peer's own included if announced, sorted by PeerID."""
