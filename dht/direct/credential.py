"""What others need to reach and recognise a peer: its certificate and where it listens, signed by its identity.

On the wire a credential is msgpack `[certificate DER, addresses, expiry, signature]`. The signature of the identity key
covers, in a domain of its own, the PeerID, SHA-256 of the certificate, the addresses and the expiry.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from equipoise.dht import msgpack_guard
from equipoise.dht.direct.certificate import OwnCertificate, check_certificate
from equipoise.dht.direct.refusals import CredentialError
from equipoise.dht.identity import Identity, verify

MAX_CREDENTIAL_BYTES = 1024
"""Equal to `averaging.ports.MAX_CREDENTIAL_BYTES`, checked by a test: the packages do not know each other."""
MAX_ADDRESSES = 4
MAX_HOST_CHARACTERS = 253
"""Of a DNS name."""
LIFE_SECONDS = 7 * 86400.0
"""Of a credential; signed anew, with the same certificate, at half of it. A week bounds how long a key that was
stolen from a daemon's memory, the only place where it is, is good for, and is far above what clocks are off."""
MAX_LIFE_SECONDS = 60 * 86400.0
"""More than this ahead is refused: nobody needs it, and clocks are not off by months."""

_DOMAIN = "direct"
_HOSTNAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True)
class Credential:
    """A credential that was found genuine.

    Attributes:
        peer: Whose it is.
        certificate: DER of the one certificate it uses.
        addresses: Where it listens, (host, port), best first; empty if it only dials.
        expires: Seconds since 1970.
    """

    peer: str
    certificate: bytes
    addresses: tuple[tuple[str, int], ...]
    expires: float

    def check(self, now: float) -> None:
        """Check that it has not expired.

        Raises:
            CredentialError: It has.
        """
        if now >= self.expires:
            raise CredentialError("expired", f"the credential of {self.peer} has expired")


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    certificate: bytes
    addresses: tuple[str, ...]
    expires: float
    signature: bytes


_decode = msgspec.msgpack.Decoder(_Wire).decode
_encode = msgspec.msgpack.Encoder().encode


def issue(
    identity: Identity,
    certificate: OwnCertificate,
    addresses: Sequence[tuple[str, int]],
    now: float,
    life: float = LIFE_SECONDS,
) -> bytes:
    """Sign a credential; addresses that nobody would take are left out, and of those that do not fit the last ones."""
    told = [f"{host} {port}" for host, port in addresses if _is_host(host)][:MAX_ADDRESSES]
    expires = min(now + life, certificate.expires)
    while True:
        signed = _signed(identity.peer, certificate.der, tuple(told), expires)
        data = _encode(_Wire(certificate.der, tuple(told), expires, identity.sign(_DOMAIN, signed)))
        if len(data) <= MAX_CREDENTIAL_BYTES or not told:
            return data
        told.pop()


def parse(peer: str, data: bytes, now: float) -> Credential:
    """Decode what `peer` is said to have signed and check everything about it.

    Raises:
        CredentialError: It is malformed, expired, another peer's, or its certificate is.
    """
    wire = _decoded(data)
    addresses = tuple(_address(text) for text in wire.addresses)
    if not math.isfinite(wire.expires) or wire.expires > now + MAX_LIFE_SECONDS:
        raise CredentialError("malformed credential", "expected an expiry within 60 days")
    signed = _signed(peer, wire.certificate, wire.addresses, wire.expires)
    if not verify(peer, _DOMAIN, signed, wire.signature):
        raise CredentialError("impostor", f"the credential is not signed by {peer}")
    if now >= wire.expires:
        raise CredentialError("expired", f"the credential of {peer} has expired")
    ends = check_certificate(wire.certificate, peer, now)
    return Credential(peer, wire.certificate, addresses, min(wire.expires, ends))


def _decoded(data: bytes) -> _Wire:
    try:
        msgpack_guard.check(data, MAX_CREDENTIAL_BYTES)
        wire = _decode(data)
    except (msgspec.MsgspecError, msgpack_guard.Unsafe, UnicodeDecodeError) as error:
        raise CredentialError("malformed credential", f"malformed credential: {error}") from None
    if len(wire.addresses) > MAX_ADDRESSES:
        raise CredentialError("malformed credential", f"expected at most {MAX_ADDRESSES} addresses")
    return wire


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(" ")
    if not _is_host(host) or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise CredentialError("malformed credential", "expected addresses of the form 'host port'")
    if not 1 <= int(port) <= 65535:
        raise CredentialError("malformed credential", f"expected a port from 1 to 65535, got {port}")
    return host, int(port)


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return len(text) <= MAX_HOST_CHARACTERS and _HOSTNAME.fullmatch(text) is not None
    return "%" not in text


def _signed(peer: str, certificate: bytes, addresses: tuple[str, ...], expires: float) -> bytes:
    # Through an encoder whose values carry their lengths: no two contents give the same bytes.
    return _encode([peer, hashlib.sha256(certificate).digest(), addresses, expires])
