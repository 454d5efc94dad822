"""Credentials: certificate and addresses of a peer, signed by its identity; and the peers admitted with theirs.

Others reach and recognise a peer by its credential. The certificate is of an Ed25519 key that never leaves the memory
of the process. It is self-signed, holds the PeerID, and vouches for nothing by itself.

On the wire a credential is msgpack `[certificate DER, addresses, signature]`. The signature of the identity key
covers, in a domain of its own, the PeerID, SHA-256 of the certificate, and the addresses. A credential expires with its
certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from equipoise.dht.address import is_host
from equipoise.dht.direct.errors import Refused
from equipoise.dht.identity import Identity, verify
from equipoise.dht.limits import LruDict
from equipoise.dht.sanitize import Malformed, decode

LIFE_SECONDS = 7 * 86400.0
"""Life of a certificate; a daemon that runs longer makes a new one at half of it. A week bounds the use of a key that
was stolen from a daemon's memory, its only place, and is far above the error of clocks."""
MAX_LIFE_SECONDS = 60 * 86400.0
"""Longest life of a certificate that this peer accepts: no peer needs more, and clocks are not off by months."""
BACKDATED_SECONDS = 30 * 86400.0
"""Most seconds that a verifier's clock may be behind a fresh certificate: OpenSSL judges by the local clock. This is
far above the day that clocks may be off. An early start is harmless: the key is no older than the process."""
SERIAL_BYTES = 16
MAX_CREDENTIAL_BYTES = 1024
"""Equal to `averaging.ports.MAX_CREDENTIAL_BYTES`, checked by a test: the packages do not know each other."""
MAX_ADDRESSES = 4
"""Most addresses in a credential; of more addresses, the first count."""
MAX_ADMITTED = 1024
"""Most peers admitted: the members of some hours' rounds. The oldest is forgotten."""

_DOMAIN = "direct"


@dataclass(frozen=True)
class OwnCertificate:
    """A certificate (DER), the key that signed it, and its expiry in seconds since 1970."""

    der: bytes
    key: Ed25519PrivateKey = field(repr=False)
    expires: float


def make_certificate(peer: str, now: float) -> OwnCertificate:
    """Make a key and its certificate.

    With equal subjects, OpenSSL would look for the wrong issuer and refuse genuine certificates. So each certificate
    has a subject of its own: the PeerID and a random number.
    """
    key = Ed25519PrivateKey.generate()
    parts = {NameOID.COMMON_NAME: peer, NameOID.SERIAL_NUMBER: secrets.token_hex(SERIAL_BYTES)}
    name = x509.Name([x509.NameAttribute(kind, value) for kind, value in parts.items()])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(now - BACKDATED_SECONDS))
        .not_valid_after(_moment(now + LIFE_SECONDS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )
    expires = certificate.not_valid_after_utc.timestamp()
    return OwnCertificate(certificate.public_bytes(Encoding.DER), key, expires)


def check_certificate(der: bytes, peer: str, now: float) -> float:
    """Check that the daemon of `peer` made a stranger's certificate for itself; return when it expires.

    The PeerID inside keeps a member from presenting another peer's certificate, and passing that peer's connections on
    as its own: only the holder of the certificate's key could have signed that PeerID. Raises Refused if the
    certificate is malformed, not Ed25519, not self-signed, another peer's, or not valid now.
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
    except Exception as error:  # x509 does not document all errors that malformed input can raise.
        raise Refused("malformed credential", f"malformed certificate: {type(error).__name__}") from None
    if names != [peer]:
        raise Refused("replayed certificate", f"expected a certificate of {peer}, got another peer's")
    if not begins.timestamp() <= now < ends.timestamp():
        raise Refused("expired", f"the certificate of {peer} is not valid at this time")
    if ends.timestamp() > now + MAX_LIFE_SECONDS:
        raise Refused("malformed credential", "expected an expiry within 60 days")
    return ends.timestamp()


def fingerprint_of(certificate: bytes) -> bytes:
    """Return the SHA-256 of a certificate's DER."""
    return hashlib.sha256(certificate).digest()


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


@dataclass(frozen=True)
class Credential:
    """A verified credential, `signed`, valid until `expires`.

    `peer` has the one `certificate` (DER), and listens at `addresses`, best first; empty if it does not listen.
    """

    peer: str
    certificate: bytes
    addresses: tuple[tuple[str, int], ...]
    expires: float
    signed: bytes

    def check(self, now: float) -> None:
        """Raise Refused if the credential has expired."""
        if now >= self.expires:
            raise Refused("expired", f"the credential of {self.peer} has expired")


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    certificate: bytes
    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    signature: bytes


_decoder = msgspec.msgpack.Decoder(_Wire)
_encode = msgspec.msgpack.Encoder().encode


def issue(identity: Identity, certificate: OwnCertificate, addresses: Sequence[tuple[str, int]]) -> bytes:
    """Sign a credential; leave out addresses that no peer would accept and, if not all fit, the last ones."""
    told = [f"{host} {port}" for host, port in addresses if is_host(host)][:MAX_ADDRESSES]
    while True:
        signed = _signed(identity.peer, certificate.der, tuple(told))
        data = _encode(_Wire(certificate.der, tuple(told), identity.sign(_DOMAIN, signed)))
        if len(data) <= MAX_CREDENTIAL_BYTES or not told:
            return data
        told.pop()


def parse(peer: str, data: bytes, now: float) -> Credential:
    """Decode the credential of `peer`; raises Refused unless all of it is genuine and valid now."""
    try:
        wire = decode(_decoder, data, MAX_CREDENTIAL_BYTES, "credential")
    except Malformed as error:
        raise Refused("malformed credential", str(error)) from None
    addresses = tuple(_address(text) for text in wire.addresses)
    if not verify(peer, _DOMAIN, _signed(peer, wire.certificate, wire.addresses), wire.signature):
        raise Refused("impostor", f"the credential is not signed by {peer}")
    return Credential(peer, wire.certificate, addresses, check_certificate(wire.certificate, peer, now), data)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(" ")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not (is_host(host) and digits and 1 <= int(port) <= 65535):
        raise Refused("malformed credential", "expected addresses as 'host port', ports from 1 to 65535")
    return host, int(port)


def _signed(peer: str, certificate: bytes, addresses: tuple[str, ...]) -> bytes:
    # The encoder writes the length of each value, so no two contents give the same bytes.
    return _encode([peer, fingerprint_of(certificate), addresses])


class Presence:
    """This peer's certificate, the addresses of its direct listener, and its credential, renewed before it expires."""

    def __init__(self, identity: Identity, clock: Callable[[], float]) -> None:
        """`clock` returns the swarm's time, seconds since 1970."""
        self.addresses: tuple[tuple[str, int], ...] = ()
        self.certificate = make_certificate(identity.peer, clock())
        self._identity = identity
        self._clock = clock
        self._credential = b""

    @property
    def credential(self) -> bytes:
        """The signed credential; renewed at half of its life, and when addresses change."""
        now = self._clock()
        if self.certificate.expires - now < LIFE_SECONDS / 2:
            # Peers that know only the old certificate cannot connect until the next round's joins have spread.
            self.certificate = make_certificate(self._identity.peer, now)
            self._credential = b""
        self._credential = self._credential or issue(self._identity, self.certificate, self.addresses)
        return self._credential

    def tell(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Tell others these addresses from now on."""
        if tuple(addresses) != self.addresses:
            self.addresses = tuple(addresses)
            self._credential = b""


class Allowlist(LruDict[str, Credential]):
    """The peers that may connect, by PeerID, each with the latest credential with which it was admitted.

    Members of this peer's rounds are admitted, and peers of its runs that ask for a state or are asked for one. An
    admission is to the daemon, not to one round. It does not end with the round: the next round is seconds away, and
    its members keep the channel. It ends with the credential, or when `MAX_ADMITTED` others have come since.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Credentials expire by `clock`, the swarm's time in seconds since 1970."""
        super().__init__(MAX_ADMITTED)
        self._clock = clock
        self._news = asyncio.Event()

    def admit(self, peer: str, data: bytes) -> None:
        """Accept `peer` with this credential from now on; raises Refused if the credential is false or has expired."""
        known = self.get(peer)
        if known is not None and known.signed == data:  # Its two signatures (0.3 ms) were verified before.
            known.check(self._clock())
        else:
            known = parse(peer, bytes(data), self._clock())
        self[peer] = known
        self._news.set()
        self._news = asyncio.Event()

    def current(self, peer: str) -> Credential:
        """Return the credential of `peer`; raises Refused if it was not admitted, or its credential has expired."""
        found = self.get(peer)
        if found is None:
            raise Refused("not a member", f"{peer} is in no group with this peer")
        found.check(self._clock())
        return found

    async def expect(self, peer: str, fingerprint: bytes, seconds: float) -> Credential:
        """Return the credential of `peer`; wait until it is admitted with the certificate that it claims to have.

        A peer may come before the news that it is a member or, after a restart, that it has a new certificate. Raises
        Refused if `peer` is not admitted in time, has another certificate, or its credential has expired.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (known := self.get(peer)) is None or fingerprint_of(known.certificate) != fingerprint:
                    await self._news.wait()
        found = self.current(peer)
        if fingerprint_of(found.certificate) != fingerprint:
            raise Refused("impostor", f"it has another certificate than {peer}")
        return found
