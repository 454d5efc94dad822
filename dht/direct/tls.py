"""One side of a TLS connection as a machine: bytes of the network in and out, no socket.

By pyOpenSSL, on the OpenSSL that `cryptography` brings along: an interpreter's own is often years older, and may
encrypt at a quarter of the pace. (Measured with 3.0 and 4.0: 0.61 and 0.36 s per GB, sealed and opened.)
"""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL, crypto

from equipoise.dht.direct.credential import OwnCertificate
from equipoise.dht.direct.errors import Refused

_PARTIAL_WRITE = 1
"""SSL_MODE_ENABLE_PARTIAL_WRITE of OpenSSL's ssl.h, which pyOpenSSL sets: a call of Python for every record."""
RECORD_BYTES = 16 * 1024
"""Most plaintext of a record (RFC 8446, section 5.1); OpenSSL hands out one record at a time."""
OVERHEAD_BYTES = 32
"""Bound above the bytes that a record takes beside its plaintext: 5 of prefix, 16 of tag, one of type."""
GREETING_RECORD_BYTES = 5 + 1 + 1 + 16
"""Size of a record with one byte of plaintext."""
EXTRA_BYTES = 32 * 1024
"""Bound above the bytes that OpenSSL sends by itself: a flight of the handshake, an alert, an answer to new keys."""

_EXPORTER = b"EXPORTER-equipoise-direct"
_EXPIRED = {9, 10}
"""X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED."""


def _make_context(own: OwnCertificate, trusted: bytes, *, server: bool) -> SSL.Context:
    """Return a context that presents `own` and trusts the certificate `trusted` (DER) only.

    One context per peer, instead of one that trusts a whole group: the connection is then with that peer or with
    nobody. No authority of the system's is trusted, for a context of pyOpenSSL begins with none. Not a single session
    is resumed, for a resumed one would not look at certificates: servers keep none and hand out no tickets. A
    certificate that is trusted can sign others if its extensions say so; `handshake` compares the leaf.
    """
    context = SSL.Context(SSL.TLS_SERVER_METHOD if server else SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_max_proto_version(SSL.TLS1_3_VERSION)
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_RENEGOTIATION)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.clear_mode(_PARTIAL_WRITE)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _verified)
    context.use_certificate(x509.load_der_x509_certificate(own.der))
    context.use_privatekey(own.key)
    store = context.get_cert_store()
    assert store is not None
    store.add_cert(crypto.X509.from_cryptography(x509.load_der_x509_certificate(trusted)))
    return context


def _verified(connection: SSL.Connection, _: crypto.X509, error: int, depth: int, taken: int) -> bool:
    """Leave OpenSSL's judgement as it is, and note why it refuses: its exceptions do not say."""
    if not taken:
        connection.set_app_data(error)
    return bool(taken)


class TlsSession:
    """TLS 1.3 between two memory buffers."""

    def __init__(self, own: OwnCertificate, trusted: bytes, *, server: bool) -> None:
        """Present `own`, and trust the certificate `trusted` (DER) only; `server` is the side that accepts."""
        self._tls = SSL.Connection(_make_context(own, trusted, server=server))
        if server:
            self._tls.set_accept_state()
        else:
            self._tls.set_connect_state()

    @property
    def certificate(self) -> bytes | None:
        """DER of the other side's certificate, once the handshake is over."""
        found = self._tls.get_peer_certificate(as_cryptography=True)
        return None if found is None else found.public_bytes(Encoding.DER)

    def shake_hands(self) -> bool:
        """Go on with the handshake; return whether it is over at this side. Raises Refused if it failed."""
        try:
            self._tls.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as error:
            raise self._fault(error) from None
        return True

    def feed(self, data: memoryview | bytes) -> None:
        """Take in bytes from the network."""
        if data:  # OpenSSL takes nothing for an error.
            self._tls.bio_write(data)

    def end(self) -> None:
        """The network has no more bytes."""
        self._tls.bio_shutdown()

    def seal(self, plain: memoryview | bytes = b"") -> bytes:
        """Return `plain` as bytes for the network, with whatever waited to be sent."""
        size = len(plain)
        if size:
            # All of it: `_make_context` has OpenSSL write nothing in part, and memory takes everything.
            self._tls.send(plain)
        try:
            return self._tls.bio_read(size + (size // RECORD_BYTES + 1) * OVERHEAD_BYTES + EXTRA_BYTES)
        except SSL.WantReadError:
            return b""

    def open_into(self, view: memoryview) -> int:
        """Fill `view` from what was fed, as far as that goes; return how much.

        Raises Refused if what was fed is not authentic, or the other side has ended TLS.
        """
        read = self._tls.recv_into
        done, whole = 0, len(view)
        try:
            # A record of 16 KiB at most comes out at a time: hundreds a round, so nothing is looked up twice here.
            while done < whole:
                done += read(view[done:], RECORD_BYTES)
        except SSL.WantReadError:
            pass
        except (SSL.ZeroReturnError, SSL.SysCallError) as error:
            if not done:
                raise self._fault(error) from None
        except SSL.Error as error:
            raise self._fault(error) from None
        return done

    def export_key(self, sender: bytes, size: int) -> bytes:
        """Return a key that only the two sides know, for what `sender` sends beyond TLS (RFC 8446, section 7.5)."""
        return self._tls.export_keying_material(_EXPORTER, size, sender)

    def _fault(self, error: SSL.Error) -> Refused:
        """Say in a few words why TLS ended."""
        if isinstance(error, SSL.ZeroReturnError | SSL.SysCallError):
            return Refused("went away", "closed by the other end")
        code = self._tls.get_app_data()
        if code in _EXPIRED:
            return Refused("expired", "its certificate is not taken: it is not valid at this time")
        if code:
            why = f"its certificate is not taken: it is not the one announced (X.509 error {code})"
            return Refused("impostor", why)
        reasons = "; ".join(reason for _, _, reason in error.args[0]) if error.args else ""
        if "signature" in reasons:
            return Refused("replayed certificate", "it does not hold the key of the certificate it shows")
        return Refused("tls failure", reasons or "OpenSSL does not say why")
