"""Opens a stream on a fresh TCP connection, at either side; every wait is bounded by the caller.

Preface in the clear, TLS 1.3 with both certificates, then a greeting of each side inside TLS. Because a TLS 1.3
client's handshake returns before the server has judged its certificate, a stream is open only after the other side's
greeting.
"""

from __future__ import annotations

import asyncio
import secrets
import socket

from OpenSSL import SSL

from equipoise.dht.direct import aead
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.hello import (
    GREETING_BYTES,
    PREFACE_BYTES,
    SECRET_BYTES,
    Preface,
    encode_greeting,
    parse_greeting,
)
from equipoise.dht.direct.streams import AeadStream, PlainStream, TlsStream
from equipoise.dht.direct.tls import TlsFault, TlsSession
from equipoise.dht.streams import HEAD_BYTES, StreamClosed


async def receive_opening(connection: socket.socket) -> bytes:
    """Read the `PREFACE_BYTES` with which the dialling side begins, and no byte more.

    Raises:
        Refused: The connection ended.
    """
    data = bytearray(PREFACE_BYTES)
    view, loop = memoryview(data), asyncio.get_running_loop()
    while view:
        try:
            got = await loop.sock_recv_into(connection, view)
        except OSError as error:
            raise Refused("went away", error.strerror or str(error)) from None
        if not got:
            raise Refused("went away", "it closed the connection before it said who it is")
        view = view[got:]
    return bytes(data)


async def secure(
    connection: socket.socket, context: SSL.Context, expected: bytes, preface: Preface, *, dialler: bool
) -> PlainStream:
    """Prove to each other who both are, and return the stream of the layer agreed on.

    Args:
        connection: Non-blocking, after the preface; it is taken over, and closed if this fails.
        context: Trusts the other side's certificate only.
        expected: DER of that certificate.
        preface: What was agreed.
        dialler: Whether this side has dialled.

    Raises:
        Refused: The other side is not who it must be, refuses this side, or ends the connection.
    """
    connection = socket.socket(fileno=connection.detach())
    try:
        tls = TlsSession(context, server=not dialler)
        await _shake_hands(connection, tls)
        if tls.certificate != expected:
            raise Refused("impostor", "it holds a certificate that another one vouches for, not its own")
        own = secrets.token_bytes(SECRET_BYTES)
        await _write(connection, tls.seal(encode_greeting(preface.layer, own)))
        theirs = parse_greeting(await _receive(connection, tls, GREETING_BYTES), preface.layer)
        return _stream(connection, tls, preface, (own, theirs), dialler)
    except TlsFault as fault:
        connection.close()
        raise _refusal(fault) from None
    except BaseException:
        connection.close()
        raise


def _stream(
    connection: socket.socket, tls: TlsSession, preface: Preface, secrets: tuple[bytes, bytes], dialler: bool
) -> PlainStream:
    if preface.layer == "tls":
        tls.stay()
        return TlsStream(connection, tls)
    peers = (preface.dialler, preface.acceptor)
    ordered = secrets if dialler else secrets[::-1]
    key = aead.traffic_key(ordered, peers, of_dialler=dialler)
    their_key = aead.traffic_key(ordered, peers, of_dialler=not dialler)
    return AeadStream(connection, aead.Sealer(key), aead.Opener(their_key), tls.leave())


async def _shake_hands(connection: socket.socket, tls: TlsSession) -> None:
    while not tls.shake_hands():
        await _write(connection, tls.drain())
        await _read(connection, tls)
    await _write(connection, tls.drain())


async def _receive(connection: socket.socket, tls: TlsSession, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        opened = tls.open_into(view)
        if not opened:
            await _read(connection, tls)
        view = view[opened:]
    return bytes(data)


async def _read(connection: socket.socket, tls: TlsSession) -> None:
    try:
        # So few that what follows TLS fits the buffer of the layer that it is for.
        data = await asyncio.get_running_loop().sock_recv(connection, HEAD_BYTES)
    except OSError as error:
        raise Refused("went away", error.strerror or str(error)) from None
    if data:
        tls.feed(data)
    else:
        tls.end()


async def _write(connection: socket.socket, data: bytes) -> None:
    try:
        await asyncio.get_running_loop().sock_sendall(connection, data)
    except OSError as error:
        raise Refused("went away", error.strerror or str(error)) from None


def _refusal(fault: TlsFault) -> Refused:
    if fault.why == "went away":
        return Refused(fault.why, "it ended the connection instead of greeting: it refuses this peer")
    return Refused(fault.why, str(fault))


async def forgo(connection: socket.socket, *, dialler: bool) -> PlainStream:
    """Return a stream that proves and encrypts nothing; the caller has checked that it stays on this machine.

    Args:
        connection: Non-blocking, after the preface; it is taken over, and closed if this fails.
        dialler: Whether this side has dialled.

    Raises:
        Refused: The other side ended the connection.
    """
    stream = PlainStream(socket.socket(fileno=connection.detach()))
    try:
        # The accepting side's byte says that it was willing.
        if dialler:
            await stream.receive_into(memoryview(bytearray(1)))
        else:
            await stream.send(b"\0")
    except StreamClosed as error:
        stream.close()
        raise Refused("went away", str(error)) from None
    except BaseException:
        stream.close()
        raise
    return stream
