"""What others need to reach and recognise a peer: its certificate and where it listens, signed by its identity.

On the wire a credential is msgpack `[certificate DER, addresses, expiry, signature]`. The signature of the identity key
covers, in a domain of its own, the PeerID, SHA-256 of the certificate, the addresses and the expiry.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from equipoise.dht.address import is_host
from equipoise.dht.direct import certificate as certificates
from equipoise.dht.direct.certificate import OwnCertificate, check_certificate, make_certificate
from equipoise.dht.direct.errors import Refused
from equipoise.dht.identity import Identity, verify
from equipoise.dht.sanitize import Malformed, decode

MAX_CREDENTIAL_BYTES = 1024
"""Equal to `averaging.ports.MAX_CREDENTIAL_BYTES`, checked by a test: the packages do not know each other."""
MAX_ADDRESSES = 4
LIFE_SECONDS = 7 * 86400.0
"""Of a credential; signed anew, with the same certificate, at half of it. A week bounds how long a key that was
stolen from a daemon's memory, the only place where it is, is good for, and is far above what clocks are off."""
MAX_LIFE_SECONDS = 60 * 86400.0
"""More than this ahead is refused: nobody needs it, and clocks are not off by months."""

_DOMAIN = "direct"


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
        """Check that it has not expired; raises Refused if it has."""
        if now >= self.expires:
            raise Refused("expired", f"the credential of {self.peer} has expired")


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    certificate: bytes
    addresses: tuple[str, ...]
    expires: float
    signature: bytes


_decoder = msgspec.msgpack.Decoder(_Wire)
_encode = msgspec.msgpack.Encoder().encode


def issue(
    identity: Identity,
    certificate: OwnCertificate,
    addresses: Sequence[tuple[str, int]],
    now: float,
    life: float = LIFE_SECONDS,
) -> bytes:
    """Sign a credential; addresses that nobody would take are left out, and of those that do not fit the last ones."""
    told = [f"{host} {port}" for host, port in addresses if is_host(host)][:MAX_ADDRESSES]
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
        Refused: It is malformed, expired, another peer's, or its certificate is.
    """
    wire = _decoded(data)
    addresses = tuple(_address(text) for text in wire.addresses)
    if not math.isfinite(wire.expires) or wire.expires > now + MAX_LIFE_SECONDS:
        raise Refused("malformed credential", "expected an expiry within 60 days")
    signed = _signed(peer, wire.certificate, wire.addresses, wire.expires)
    if not verify(peer, _DOMAIN, signed, wire.signature):
        raise Refused("impostor", f"the credential is not signed by {peer}")
    if now >= wire.expires:
        raise Refused("expired", f"the credential of {peer} has expired")
    ends = check_certificate(wire.certificate, peer, now)
    return Credential(peer, wire.certificate, addresses, min(wire.expires, ends))


def _decoded(data: bytes) -> _Wire:
    try:
        wire = decode(_decoder, data, MAX_CREDENTIAL_BYTES)
    except Malformed as error:
        raise Refused("malformed credential", f"malformed credential: {error}") from None
    if len(wire.addresses) > MAX_ADDRESSES:
        raise Refused("malformed credential", f"expected at most {MAX_ADDRESSES} addresses")
    return wire


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(" ")
    if not is_host(host) or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise Refused("malformed credential", "expected addresses of the form 'host port'")
    if not 1 <= int(port) <= 65535:
        raise Refused("malformed credential", f"expected a port from 1 to 65535, got {port}")
    return host, int(port)


def _signed(peer: str, certificate: bytes, addresses: tuple[str, ...], expires: float) -> bytes:
    # Through an encoder whose values carry their lengths: no two contents give the same bytes.
    return _encode([peer, hashlib.sha256(certificate).digest(), addresses, expires])


class Presence:
    """What this peer shows of itself: its certificate, and the credential for it, renewed before they expire.

    Attributes:
        addresses: Where this peer's direct listener is reached, (host, port).
        certificate: The certificate that connections present.
    """

    def __init__(self, identity: Identity, clock: Callable[[], float]) -> None:
        """`clock` tells the swarm's time, seconds since 1970."""
        self.addresses: tuple[tuple[str, int], ...] = ()
        self.certificate = make_certificate(identity.peer, clock())
        self._identity = identity
        self._clock = clock
        self._credential = b""
        self._renew_at = 0.0

    @property
    def credential(self) -> bytes:
        """The signed credential; a new one from time to time, and when addresses change."""
        now = self._clock()
        if now >= self._renew_at or not self._credential:
            if self.certificate.expires - now < certificates.LIFE_SECONDS / 2:
                # Who knows only the old one cannot connect until the next round's joins have gone round.
                self.certificate = make_certificate(self._identity.peer, now)
            self._credential = issue(self._identity, self.certificate, self.addresses, now)
            self._renew_at = now + LIFE_SECONDS / 2
        return self._credential

    def tell(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Tell others these addresses from now on."""
        if tuple(addresses) != self.addresses:
            self.addresses = tuple(addresses)
            self._credential = b""
