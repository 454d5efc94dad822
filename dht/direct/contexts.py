"""TLS contexts that trust exactly one certificate."""

from __future__ import annotations

from cryptography import x509
from OpenSSL import SSL, crypto

from equipoise.dht.direct.certificate import OwnCertificate

_PARTIAL_WRITE = 1
"""SSL_MODE_ENABLE_PARTIAL_WRITE of OpenSSL's ssl.h, which pyOpenSSL sets: a call of Python for every record."""


def make_context(own: OwnCertificate, trusted: bytes, *, server: bool) -> SSL.Context:
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
