"""One side of a TLS connection as a machine: bytes of the network in and out, no socket.

By pyOpenSSL, on the OpenSSL that `cryptography` brings along: an interpreter's own is often years older, and may
encrypt at a quarter of the pace. (Measured with 3.0 and 4.0: 0.61 and 0.36 s per GB, sealed and opened.)
"""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID
from OpenSSL import SSL, crypto

from equipoise.dht.direct.errors import Refused
from equipoise.dht.identity import Identity, peer_of

_PARTIAL_WRITE = 1
"""SSL_MODE_ENABLE_PARTIAL_WRITE of OpenSSL's ssl.h, which pyOpenSSL sets: a call of Python for every record."""
RECORD_BYTES = 16 * 1024
"""Most plaintext of a record (RFC 8446, section 5.1); OpenSSL hands out one record at a time."""
OVERHEAD_BYTES = 32
"""Bound above the bytes that a record takes beside its plaintext: 5 of prefix, 16 of tag, one of type."""
EXTRA_BYTES = 32 * 1024
"""Bound above the bytes that OpenSSL sends by itself: a flight of the handshake, an alert, an answer to new keys."""

_EXPORTER = b"EXPORTER-equipoise-direct"
_BEGINS = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_ENDS = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""The end of a certificate that does not expire (RFC 5280, section 4.1.2.5): an identity key does not expire, and the
clocks of peers may be wrong by any amount."""
_SELF_SIGNED = SSL.X509VerificationCodes.ERR_DEPTH_ZERO_SELF_SIGNED_CERT


def make_context(identity: Identity) -> SSL.Context:
    """Return what all TLS sessions of `identity` share: its certificate, its key, and what it takes of others.

    The identity key is the key of the certificate, and signs the handshake (CertificateVerify: RFC 8446, section
    4.4.3). So TLS proves that the other side holds the key in its certificate, and `TlsSession.peer` is the PeerID that
    is this key. Nothing else in a certificate counts, nobody vouches for another, and nothing is trusted: a context of
    pyOpenSSL begins with no authority. Not a single session is resumed, for a resumed one would not prove a key:
    servers keep none, and their tickets are good for nothing.
    """
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_max_proto_version(SSL.TLS1_3_VERSION)
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_RENEGOTIATION)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.clear_mode(_PARTIAL_WRITE)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _takes)
    context.use_certificate(_make_certificate(identity))
    context.use_privatekey(identity.key)
    return context


def _make_certificate(identity: Identity) -> x509.Certificate:
    """Return a certificate of the identity key that the key itself signs, and that is valid at all times."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer)])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(identity.key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGINS)
        .not_valid_after(_ENDS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(identity.key, None)
    )


def _takes(connection: SSL.Connection, _: crypto.X509, error: int, depth: int, taken: int) -> bool:
    """Take a certificate that says it is its own issuer: who holds its key is proved later, and compared by PeerID.

    A certificate that another one vouches for is refused, before OpenSSL checks any signature of a chain. What OpenSSL
    refuses is noted: its exceptions do not say.
    """
    if taken or error == _SELF_SIGNED:
        return True
    connection.set_app_data(error)
    return False


class TlsSession:
    """TLS 1.3 between two memory buffers."""

    def __init__(self, context: SSL.Context, *, server: bool) -> None:
        """Begin a session with a context of `make_context`; `server` is the side that accepts."""
        self._tls = SSL.Connection(context)
        if server:
            self._tls.set_accept_state()
        else:
            self._tls.set_connect_state()

    @property
    def peer(self) -> str:
        """PeerID of the other side once the handshake is over; empty if its key is not Ed25519.

        The key is asked of OpenSSL, not read from the certificate's bytes by another parser, which a stranger could
        make see another key than the one that has signed the handshake.
        """
        found = self._tls.get_peer_certificate()
        try:
            key = None if found is None else found.get_pubkey().to_cryptography_key()
        except Exception:  # Neither library documents all errors that other kinds of keys can raise.
            key = None
        return peer_of(key.public_bytes_raw()) if isinstance(key, Ed25519PublicKey) else ""

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
        """Take in bytes from the network; none: there are no more."""
        if data:
            self._tls.bio_write(data)
        else:
            self._tls.bio_shutdown()

    def seal(self, plain: memoryview | bytes = b"") -> bytes:
        """Return `plain` as bytes for the network, with whatever waited to be sent."""
        size = len(plain)
        if size:
            # All of it: `make_context` has OpenSSL write nothing in part, and memory takes everything.
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
        if code:
            return Refused(
                "impostor", f"its certificate is not one that it signed itself (X.509 error {code})"
            )
        reasons = "; ".join(reason for _, _, reason in error.args[0]) if error.args else ""
        if "signature" in reasons:
            return Refused("impostor", "it does not hold the key of the certificate it shows")
        return Refused("tls failure", reasons or "OpenSSL does not say why")
