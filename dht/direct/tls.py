"""One side of a TLS connection as a machine: bytes of the network in and out, no socket."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import cast


class TlsSession:
    """TLS 1.3 between two memory buffers.

    Args:
        context: Whom to trust, and this side's certificate.
        server: Whether this side accepts.
    """

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)

    @property
    def certificate(self) -> bytes | None:
        """DER of the other side's certificate, once the handshake is over."""
        return self._tls.getpeercert(binary_form=True)

    def shake_hands(self) -> bool:
        """Go on with the handshake; returns whether it is over at this side.

        Raises:
            ssl.SSLError: It failed.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def feed(self, data: memoryview | bytes) -> None:
        """Take in bytes from the network."""
        self._incoming.write(data)

    def end(self) -> None:
        """The network has no more bytes."""
        self._incoming.write_eof()

    def drain(self) -> bytes:
        """Return the bytes for the network that have accumulated."""
        return self._outgoing.read()

    def seal(self, plain: memoryview | bytes) -> bytes:
        """Return `plain` as bytes for the network, with whatever waited to be sent."""
        view = memoryview(plain)
        while view:
            view = view[self._tls.write(view) :]
        return self._outgoing.read()

    def open_into(self, view: memoryview) -> int:
        """Fill the beginning of `view` from what was fed; returns how many bytes, 0 if more must be fed first.

        Raises:
            ssl.SSLError: What was fed is not authentic, or the other side has ended TLS.
        """
        # It says how many bytes it has put into a buffer; only without one does it return them.
        read = cast("Callable[[int, memoryview], int]", self._tls.read)
        done, whole = 0, len(view)
        try:
            # A record of 16 KiB at most comes out at a time: hundreds a round, so nothing is looked up twice here.
            while done < whole:
                opened = read(whole - done, view[done:])
                if not opened:
                    raise ssl.SSLZeroReturnError(ssl.SSL_ERROR_ZERO_RETURN, "closed by the other end")
                done += opened
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError) as error:
            if not done and not isinstance(error, ssl.SSLWantReadError):
                raise
        return done

    def leave(self) -> bytes:
        """Leave TLS: return the bytes that were fed and belong to whatever comes after it.

        OpenSSL takes one record at a time from its buffer, so nothing of what follows is lost in it.

        Raises:
            ssl.SSLError: The other side has sent more inside TLS than was read.
        """
        if self._tls.pending():
            raise ssl.SSLError(0, "it sent more than its greeting")
        return self._incoming.read()


def tls_fault(error: ssl.SSLError) -> str:
    """Say in a few words why TLS ended."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "closed by the other end"
    return (error.reason or error.strerror or str(error)).lower().replace("_", " ")
