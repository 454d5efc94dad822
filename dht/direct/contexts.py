"""TLS contexts that trust exactly one certificate."""

from __future__ import annotations

import ssl
from pathlib import Path


def make_context(own: Path, trusted: bytes, *, server: bool) -> ssl.SSLContext:
    """Return a context that presents what `own` holds and trusts the certificate `trusted` (DER) only.

    One context per peer, instead of one that trusts a whole group: the connection is then with that peer or with
    nobody. Not a single session is resumed, for a resumed one would not look at certificates. A certificate that is
    trusted can sign others if its extensions say so; `handshake` compares the leaf.

    Raises:
        OSError: `own` cannot be read.
        ssl.SSLError: OpenSSL does not take a certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if server:
        context.num_tickets = 0
    context.load_cert_chain(own)
    context.load_verify_locations(cadata=trusted)
    return context
