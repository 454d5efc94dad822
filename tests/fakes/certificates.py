"""Certificates that no daemon makes, and TLS that shows them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID
from OpenSSL import SSL


def certify(
    key: Any, name: str, *, issuer: str = "", signer: Any = None, authority: bool = False
) -> x509.Certificate:
    """A certificate of `key`, which `signer` signs, or the key itself."""
    now, signer = datetime.datetime.now(datetime.UTC), signer or key
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer or name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(signer, SHA256() if isinstance(signer, ec.EllipticCurvePrivateKey) else None)
    )


def presenting(
    key: Any, certificate: x509.Certificate, chain: Sequence[x509.Certificate] = ()
) -> SSL.Context:
    """The context of a peer that shows any certificate of its key, and takes any."""
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_options(SSL.OP_NO_TICKET)
    context.set_verify(SSL.VERIFY_PEER, lambda *_: True)
    context.use_certificate(certificate)
    context.use_privatekey(key)
    for one in chain:
        context.add_extra_chain_cert(one)
    return context
