"""The needs of `averaging`: a transport of frames, and a directory of peers.

Both are structural Protocols. `equipoise.dht` implements them over libp2p, tests in memory;
`equipoise.peer` wires them in. A frame is a small header (a msgpack control message) and an optional
body (bulk values). Peers are named by their PeerID in base58, a `str`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

MAX_HEADER_BYTES = 128 * 1024
"""Longest header, of one control message; the largest is a manifest of 64 signed joins, about 80 KB."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Longest body, of one part: 512 Ki values in fp32 are 2 MiB; twice that leaves room for larger parts."""

MAX_CREDENTIAL_BYTES = 1024
"""Longest credential: a certificate of an Ed25519 key, its owner's addresses and a signature take about 500 bytes."""

Buffer = bytes | bytearray | memoryview

Place = Callable[[bytes, int], memoryview]
"""Given a frame's header and its body's size, return the writable buffer of exactly that size to receive the body
into, or raise `FrameRefused`. It is called before memory is taken or the body is read."""


class FrameRefused(Exception):
    """The receiver will not take this frame (of no known kind, malformed, of the wrong size); the channel is closed.

    Frames of a round that it does not know, or that the sender is no member of, are not refused but passed over.
    """


def parser(kind: Any, name: str) -> Callable[[Buffer], Any]:
    """Return what parses and checks the messages of one kind that other peers send; `name` is for people.

    It raises `FrameRefused` for bytes that are no such message, or that hold a value out of its bounds.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def parse(data: Buffer) -> Any:
        try:
            return decode(data)
        # msgspec lets the last two through: deep nesting in a field that it skips, bytes of a text that are none.
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise FrameRefused(f"expected {name}, got {len(data)} bytes that are none: {error}") from error

    return parse


class Channel(Protocol):
    """An ordered, reliable, bidirectional stream of frames to one authenticated peer."""

    @property
    def peer(self) -> str:
        """PeerID of the other end, authenticated by the transport."""

    @property
    def rtt(self) -> float:
        """Round-trip time in seconds; 0 where that is not known."""

    @property
    def delivered(self) -> int:
        """Bytes that have reached the other end's kernel so far; where that cannot be told, that left this process."""

    @property
    def received(self) -> int:
        """Bytes that have come in so far, those of a frame that is not complete included."""

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
    """Channels that are the peers' own, fast, and only with peers that were admitted.

    Admitted are members of this peer's groups, and peers that take its state or give it. They are admitted to the
    daemon, not to one round, and may be for hours: whether a frame comes from a member of the round that it names
    is checked with each.
    """

    @property
    def credential(self) -> bytes:
        """The signed bytes by which others reach and recognise this peer; at most `MAX_CREDENTIAL_BYTES`."""

    def admit(self, peer: str, credential: bytes) -> None:
        """Accept channels from `peer`, and open them to it, from now on.

        Raises:
            ValueError: The credential is not genuine, has expired, or is another peer's; says which.
        """

    def meet(self, peer: str) -> None:
        """A round with `peer` begins: a channel with it is worth some effort, if it was admitted."""

    def reaches(self, peer: str) -> bool:
        """True if `peer` was admitted and says where it listens."""


class Candidate(Protocol):
    """The directory's record of one peer of a run."""

    @property
    def peer(self) -> str:
        """Its PeerID."""

    @property
    def spec(self) -> str:
        """Hash of its RunSpec; peers average together only where it equals their own."""

    @property
    def ready(self) -> bool:
        """True if it waits for a group now (else it has joined the run and computes)."""

    @property
    def left(self) -> bool:
        """True if it has left the run, and only serves what it kept of it."""

    @property
    def round(self) -> int:
        """The number of its next round."""

    @property
    def dialable(self) -> bool:
        """True if others can open channels to it."""

    @property
    def bandwidth(self) -> float:
        """The bytes per second that it says it can send; 0 if unknown."""

    @property
    def accumulated(self) -> float:
        """Weight it has accumulated towards its next contribution."""

    @property
    def credential(self) -> bytes:
        """The bytes by which others open direct channels with it, for the transport to check; empty if it has none."""


class Directory(Protocol):
    """The peers that take part in a run, as far as this peer knows."""

    async def announce(
        self,
        run: str,
        *,
        spec: str,
        ready: bool,
        round: int,
        accumulated: float,
        reason: str,
        bandwidth: float = 0.0,
        left: bool = False,
    ) -> None:
        """Publish this peer's state in the run named `run`; renewed until withdrawn.

        `bandwidth` is what this peer can send, in bytes per second; 0 if unknown. `left` says that it has left the
        run, and only serves what it kept of it.

        `spec` is the hash of the RunSpec in hex: peers of one name with different hashes see each other, so that
        each can tell its user why they do not meet.

        Weather (no network) is not an error: the record is published once that is possible.
        """

    async def withdraw(self, run: str) -> None:
        """Stop announcing this peer in `run`, and let the record expire at once where it can be."""

    async def peers(self, run: str) -> Sequence[Candidate]:
        """The verified, unexpired records of `run`, this peer's own included if announced, sorted by PeerID."""
