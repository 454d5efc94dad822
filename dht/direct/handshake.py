"""Opens a stream on a fresh TCP connection, at either side; every wait is bounded by the caller.

First a preface in the clear, then TLS 1.3 with both certificates, then a greeting of each side inside TLS. The preface
claims who dials whom, so that the accepting side shakes hands with admitted peers only; TLS proves the claim. Preface
and greeting have fixed sizes, so there are no lengths to trust. A TLS 1.3 client's handshake returns before the server
has judged its certificate, so a stream is open only after the other side's greeting. The dialling side greets first,
and reads no byte more than the answer: what follows may belong to another layer. A greeting confirms the layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from OpenSSL import SSL

from equipoise.dht.direct import aead
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.sockets import receive_exactly, said
from equipoise.dht.direct.streams import AeadStream, TlsStream
from equipoise.dht.direct.tls import TlsSession
from equipoise.dht.identity import peer_of, public_key_of
from equipoise.dht.options import Layer
from equipoise.dht.streams import Stream

VERSION = 6
MAGIC = b"EQPD"
_PREFACE = struct.Struct("!4sBB32s32s")
PREFACE_BYTES = _PREFACE.size
SILENT_SECONDS = 2.0
"""Longest wait of a dialling peer for the next byte of the handshake: what says nothing must not hold the dials."""
HANDSHAKE_BYTES = 4096
"""Most bytes of TLS' handshake that are read at once."""
MAX_RECORDS = 4
"""Most records of TLS, or reads of the accepting side, until the greeting has come: OpenSSL sends two tickets first,
which are good for nothing here."""
RECORD_PREFIX_BYTES = 5

_LAYERS: tuple[Layer, ...] = ("tls", "aead")
"""By their numbers in prefaces and greetings."""


@dataclass(frozen=True)
class Preface:
    """The claim of a dialling peer: the layer for frames, both PeerIDs."""

    layer: Layer
    dialler: str
    acceptor: str

    def encode(self) -> bytes:
        """Return its `PREFACE_BYTES` bytes."""
        keys = public_key_of(self.dialler), public_key_of(self.acceptor)
        return _PREFACE.pack(MAGIC, VERSION, _LAYERS.index(self.layer), *keys)


def parse_preface(data: bytes | bytearray) -> Preface:
    """Decode `PREFACE_BYTES` bytes of a stranger; raises Refused if they are no preface, or have another version."""
    magic, version, layer, dialler, acceptor = _PREFACE.unpack(data)
    if magic != MAGIC:
        raise Refused("malformed preface", "it does not begin as a direct channel does")
    if version != VERSION:
        raise Refused("other version", f"expected version {VERSION} of direct channels, got {version}")
    if layer >= len(_LAYERS):
        raise Refused("malformed preface", f"expected a layer below {len(_LAYERS)}, got {layer}")
    return Preface(_LAYERS[layer], peer_of(dialler), peer_of(acceptor))


async def secure(
    connection: socket.socket, context: SSL.Context, preface: Preface, *, dialler: bool
) -> Stream:
    """Prove both PeerIDs to the two sides, and return the stream of the layer in the preface.

    Takes over the connection, which is non-blocking and past the preface, and closes it on failure. `context` is this
    side's (`tls.make_context`); the other side must be the peer that the preface names. Raises Refused if the other
    side is another peer, refuses this side, or ends the connection.
    """
    connection = socket.socket(fileno=connection.detach())
    loop = asyncio.get_running_loop()
    with _closed_if_refused(connection):
        tls = TlsSession(context, server=not dialler)
        while not tls.shake_hands():
            await loop.sock_sendall(connection, tls.seal())
            try:
                async with asyncio.timeout(SILENT_SECONDS if dialler else None):
                    tls.feed(await loop.sock_recv(connection, HANDSHAKE_BYTES))
            except TimeoutError:
                raise Refused("timeout", f"it has sent no byte for {SILENT_SECONDS:.0f} s") from None
        expected = preface.acceptor if dialler else preface.dialler
        if tls.peer != expected:
            raise Refused("impostor", f"it holds the key of {tls.peer or 'no peer'}, not of {expected}")
        own, greeting = bytes([_LAYERS.index(preface.layer)]), bytearray(1)
        if dialler:
            await loop.sock_sendall(connection, tls.seal(own))
        records = 0
        while not tls.open_into(memoryview(greeting)):
            if records == MAX_RECORDS:
                raise Refused("tls failure", "it does not greet")
            if dialler:  # A record, and nothing of what follows, which may be no TLS.
                prefix = await receive_exactly(connection, RECORD_PREFIX_BYTES)
                tls.feed(prefix + await receive_exactly(connection, int.from_bytes(prefix[3:])))
            else:  # Nothing follows before the answer.
                tls.feed(await loop.sock_recv(connection, HANDSHAKE_BYTES))
            records += 1
        if not dialler:
            await loop.sock_sendall(connection, tls.seal(own))
        if greeting != own:  # An attacker in between has altered the preface.
            raise Refused("tls failure", f"the greeting does not confirm the layer {preface.layer}")
        if preface.layer == "tls":
            return TlsStream(connection, tls)
        of_dialler, of_acceptor = (tls.export_key(side, aead.KEY_BYTES) for side in (b"dialler", b"acceptor"))
        sends, receives = (of_dialler, of_acceptor) if dialler else (of_acceptor, of_dialler)
        return AeadStream(connection, aead.Sealer(sends), aead.Opener(receives))


@contextlib.contextmanager
def _closed_if_refused(opened: socket.socket) -> Iterator[None]:
    """Close `opened` if the context fails; raises Refused if the connection broke."""
    try:
        yield
    except BaseException as error:
        opened.close()
        if isinstance(error, Refused) and error.why == "went away":
            why = "it ended the connection instead of greeting: it refuses this peer"
            raise Refused("went away", why) from None
        if isinstance(error, OSError) and not isinstance(error, Refused):
            raise Refused("went away", said(error)) from None
        raise
