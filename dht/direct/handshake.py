"""Opens a stream on a fresh TCP connection, at either side; every wait is bounded by the caller.

Preface in the clear, TLS 1.3 with both certificates, then a greeting of each side inside TLS. Because a TLS 1.3
client's handshake returns before the server has judged its certificate, a stream is open only after the other side's
greeting.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from equipoise.dht.direct import aead
from equipoise.dht.direct.preface import (
    GREETING_BYTES,
    PREFACE_BYTES,
    SECRET_BYTES,
    Preface,
    encode_greeting,
    parse_greeting,
    parse_preface,
)
from equipoise.dht.direct.refusals import Refused, Why
from equipoise.dht.direct.streams import AeadStream, PlainStream, TlsStream
from equipoise.dht.streams import StreamClosed

_EXPIRED = {9, 10}
"""X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED."""

_Result = TypeVar("_Result")


async def receive_preface(connection: socket.socket) -> Preface:
    """Read what the dialling side claims, and no byte more.

    Raises:
        Refused: It is malformed, or the connection ended.
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
    return parse_preface(data)


async def secure(
    connection: socket.socket, context: ssl.SSLContext, expected: bytes, preface: Preface, *, dialler: bool
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
    try:
        tls = context.wrap_socket(connection, server_side=not dialler, do_handshake_on_connect=False)
    except OSError as error:
        connection.close()
        raise Refused("went away", error.strerror or str(error)) from None
    try:
        await _ready(tls, tls.do_handshake)
        if tls.getpeercert(binary_form=True) != expected:
            raise Refused("impostor", "it holds a certificate that another one vouches for, not its own")
        own = secrets.token_bytes(SECRET_BYTES)
        await _send(tls, encode_greeting(preface.layer, own))
        theirs = parse_greeting(await _receive(tls, GREETING_BYTES), preface.layer)
        return _stream(tls, preface, (own, theirs), dialler)
    except BaseException:
        tls.close()
        raise


def _stream(tls: ssl.SSLSocket, preface: Preface, secrets: tuple[bytes, bytes], dialler: bool) -> PlainStream:
    if preface.layer == "tls":
        return TlsStream(tls)
    if tls.pending():
        raise Refused("tls failure", "it sent more than its greeting")
    peers = (preface.dialler, preface.acceptor)
    ordered = secrets if dialler else secrets[::-1]
    key = aead.traffic_key(ordered, peers, of_dialler=dialler)
    their_key = aead.traffic_key(ordered, peers, of_dialler=not dialler)
    # OpenSSL reads no byte past the record it needs: what follows on the socket is the other side's first own record.
    raw = socket.socket(fileno=tls.detach())
    return AeadStream(raw, aead.Sealer(key), aead.Opener(their_key))


async def _ready(tls: ssl.SSLSocket, operation: Callable[[], _Result]) -> _Result:
    """Repeat `operation` until the socket has let it through."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return operation()
        except ssl.SSLWantReadError:
            await _wait(tls, loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await _wait(tls, loop.add_writer, loop.remove_writer)
        except ssl.SSLCertVerificationError as error:
            why: Why = "expired" if error.verify_code in _EXPIRED else "impostor"
            raise Refused(why, f"its certificate is not taken: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise _tls_refusal(error) from None
        except OSError as error:
            raise Refused("went away", error.strerror or str(error)) from None


def _tls_refusal(error: ssl.SSLError) -> Refused:
    reason = error.reason or ""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return Refused("went away", "it ended the connection within the handshake: it may not know this peer")
    if "SIGNATURE" in reason:
        return Refused("replayed certificate", "it does not hold the key of the certificate it shows")
    return Refused("tls failure", (reason or str(error)).lower().replace("_", " "))


async def _wait(
    tls: ssl.SSLSocket, add: Callable[..., object], remove: Callable[[ssl.SSLSocket], object]
) -> None:
    woken = asyncio.Event()
    add(tls, woken.set)
    try:
        await woken.wait()
    finally:
        remove(tls)


async def _send(tls: ssl.SSLSocket, data: bytes) -> None:
    while data:
        sent = await _ready(tls, partial(tls.send, data))
        data = data[sent:]


async def _receive(tls: ssl.SSLSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        got = await _ready(tls, partial(tls.recv, size - len(data)))
        if not got:
            raise Refused("went away", "it ended the connection instead of greeting: it refuses this peer")
        data += got
    return data


async def forgo(connection: socket.socket, *, dialler: bool) -> PlainStream:
    """Return a stream that proves and encrypts nothing; the caller has checked that it stays on this machine.

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
        raise Refused("went away", str(error)) from None
    return stream
