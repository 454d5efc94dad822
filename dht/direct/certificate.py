"""The TLS certificate of one daemon: an Ed25519 key that lives as long as the process, self-signed, with its PeerID
inside.

The key never leaves this process' memory. The certificate vouches for nothing by itself; `credential` binds it to the
identity.
"""

from __future__ import annotations

import datetime
import secrets
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from equipoise.dht.direct.errors import Refused

LIFE_SECONDS = 30 * 86400.0
"""Of a certificate; a daemon that runs longer makes a new one at half of it."""
BACKDATED_SECONDS = 30 * 86400.0
"""How far behind this machine's clock may be that of one that takes a fresh certificate. OpenSSL judges it by the local
clock, so this is far above the day that clocks may be off; a key that is as young as the process needs no beginning."""
SERIAL_BYTES = 16


@dataclass(frozen=True)
class OwnCertificate:
    """A certificate with its key.

    Attributes:
        der: The certificate.
        key: What it is signed with.
        expires: Seconds since 1970.
    """

    der: bytes
    key: Ed25519PrivateKey = field(repr=False)
    expires: float


def make_certificate(
    peer: str, now: float, life: float = LIFE_SECONDS, authority: bool = False
) -> OwnCertificate:
    """Make a key and its certificate.

    Equal subjects make OpenSSL look for the wrong issuer and refuse genuine certificates: each gets its own, the PeerID
    and a random number. `authority` is for tests of what an attacker might make.
    """
    key = Ed25519PrivateKey.generate()
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, peer),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, secrets.token_hex(SERIAL_BYTES)),
        ]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(now - BACKDATED_SECONDS))
        .not_valid_after(_moment(now + life))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(key, None)
    )
    return OwnCertificate(
        certificate.public_bytes(Encoding.DER), key, certificate.not_valid_after_utc.timestamp()
    )


def check_certificate(der: bytes, peer: str, now: float) -> float:
    """Check that a stranger's certificate is one that `peer`'s daemon made for itself; return when it expires.

    The name inside is what keeps a member from presenting another's certificate as its own and passing the other's
    connections on as its own: only who holds the certificate's key could have signed that name.

    Raises:
        Refused: It is malformed, not Ed25519, not self-signed, another peer's, or not valid now.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        key, subject = certificate.public_key(), certificate.subject
        names = [attribute.value for attribute in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError("expected an Ed25519 key")
        key.verify(certificate.signature, certificate.tbs_certificate_bytes)
    except InvalidSignature:
        raise Refused("malformed credential", "the certificate is not signed with its own key") from None
    except Exception as error:  # x509 promises no closed list of what malformed input makes it raise.
        raise Refused("malformed credential", f"malformed certificate: {type(error).__name__}") from None
    if names != [peer]:
        raise Refused("replayed certificate", f"expected a certificate of {peer}, got another peer's")
    if not begins.timestamp() <= now < ends.timestamp():
        raise Refused("expired", f"the certificate of {peer} is not valid at this time")
    return ends.timestamp()


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
