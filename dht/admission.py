"""Admission to a private swarm: keys, invitations, tokens, revocations, and the peers that are admitted. Sans IO.

A swarm is an Ed25519 key. Its holder signs the key of an invitation, with a role and an end; a guest signs its own
PeerID with the invitation's key, which travels in the invitation's line. The chain of both signatures is the guest's
token, which anybody verifies offline. A guest that may invite signs a further invitation with the key of its own.

Layouts are fixed, so there is no decoder to attack: a link is key, role, end, PeerID's key and signature; a token is
the swarm's key, one or two links, the member's key, and its signature. `now` is in seconds since 1970, as `time.time`.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import struct
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from equipoise.dht.address import AddressError, parse_address
from equipoise.dht.identity import peer_of, public_key_of
from equipoise.dht.sanitize import Malformed, decode
from equipoise.limits import LruDict, RateLimit

Role = Literal["trainer", "observer", "relay"]
"""A trainer does all; an observer counts with weight 0 and owns no share; a relay joins no run."""

ROLES: tuple[Role, ...] = get_args(Role)
MAX_TOKEN_BYTES = 400
MAX_INVITATIONS = 2
"""Most invitations of a chain: with the link to the PeerID it has three links."""
MAX_END = 2**32 - 1
MAX_LINE = 4096
MAX_LINE_ADDRESSES = 4
MAX_ADMITTED = 4096
"""Most peers that are remembered; one that was forgotten presents its token again."""
MAX_REVOKED = 2048
PRESENTATIONS_PER_SECOND, PRESENTATIONS_BURST = 5.0, 60.0
"""Most tokens verified for one address. Behind the router of a laboratory some dozens of daemons start at once."""

NAME_PATTERN = r"\A[A-Za-z0-9_-][A-Za-z0-9_.-]{0,31}\Z"
PREFIX = "equipoise:"
UNPRESENTED = "it has presented no token to this daemon"
"""Why a peer is refused that may have presented its token before this daemon was started again."""

_CHECKSUM_BYTES = 6
_ID_BYTES = 16
_MAY_INVITE = 0x80
_BODY = struct.Struct("!32sBI32s")
_LINK_BYTES = _BODY.size + 64
_TOKEN_BYTES = {128 + count * _LINK_BYTES: count for count in range(1, MAX_INVITATIONS + 1)}
_NUMBER = struct.Struct("!Q")
_NOBODY = bytes(32)

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]


class _Told(msgspec.Struct, array_like=True):
    """The part of an invitation's line that nobody signs: a name for people, and addresses."""

    name: Name
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=512)], ...], msgspec.Meta(max_length=MAX_LINE_ADDRESSES)
    ]


_told = msgspec.msgpack.Decoder(_Told)


class Refused(ConnectionError):
    """A token, an invitation or a peer is refused; the message says why, in one line."""


def _signed(domain: str, swarm: bytes, content: bytes) -> bytes:
    return f"equipoise/swarm/1/{domain}\0".encode() + swarm + content


@functools.lru_cache(4 * MAX_ADMITTED)  # A member's links are the same at each presentation.
def _is_signed(key: bytes, data: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (ValueError, InvalidSignature):
        return False
    return True


def shown_date(end: float) -> str:
    """Return the end of an invitation for people, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(end))


@dataclass(frozen=True)
class Link:
    """An invitation as its issuer has signed it.

    `key` is its public key, `end` its last second, `guest` the public key of the only PeerID that it admits, or empty.
    """

    key: bytes
    role: Role
    end: int
    guest: bytes = b""
    may_invite: bool = False
    signature: bytes = b""

    @property
    def id(self) -> str:
        """Its name for people, by which it is revoked."""
        return self.key[:_ID_BYTES].hex()

    @property
    def body(self) -> bytes:
        """Everything that is signed, but the swarm's key."""
        kind = ROLES.index(self.role) | (_MAY_INVITE if self.may_invite else 0)
        return _BODY.pack(self.key, kind, self.end, self.guest or _NOBODY)

    @classmethod
    def decode(cls, data: bytes) -> Link:
        """Read one link; raises Refused if it names no role."""
        key, kind, end, guest = _BODY.unpack(data[: _BODY.size])
        if (number := kind & ~_MAY_INVITE) >= len(ROLES):
            raise Refused(f"expected a role of {', '.join(ROLES)}, got number {number}")
        may_invite, guest = bool(kind & _MAY_INVITE), b"" if guest == _NOBODY else guest
        return cls(key, ROLES[number], end, guest, may_invite, data[_BODY.size :])


@dataclass(frozen=True)
class Token:
    """The chain from a swarm's key to one PeerID; `member` is that PeerID's public key."""

    swarm: bytes
    links: tuple[Link, ...]
    member: bytes
    signature: bytes

    @functools.cached_property
    def peer(self) -> str:
        """The PeerID that it admits."""
        return peer_of(self.member)

    @property
    def role(self) -> Role:
        """The role of the last invitation."""
        return self.links[-1].role

    @property
    def end(self) -> int:
        """The last second for which it is good."""
        return min(link.end for link in self.links)

    @property
    def ids(self) -> tuple[str, ...]:
        """Each name by which it can be revoked."""
        return (*(link.id for link in self.links), self.member[:_ID_BYTES].hex())

    def encode(self) -> bytes:
        """Return its bytes, fewer than `MAX_TOKEN_BYTES`."""
        links = b"".join(link.body + link.signature for link in self.links)
        return self.swarm + links + self.member + self.signature

    @classmethod
    def decode(cls, data: bytes) -> Token:
        """Read a stranger's token without verifying it; raises Refused if no token has its size or such a role."""
        if len(data) not in _TOKEN_BYTES:
            sizes = " or ".join(map(str, _TOKEN_BYTES))
            raise Refused(f"the token is malformed: expected a chain of {sizes} bytes, got {len(data)}")
        return cls(data[:32], _links(data[32:-96]), data[-96:-64], data[-64:])

    def check(self, now: float, revoked: Collection[str]) -> None:
        """Verify the token; raises Refused, which says why, if it is no good now.

        Signatures come last, from the swarm's on, so a forged token costs one verification.
        """
        if not 1 <= len(self.links) <= MAX_INVITATIONS:
            most = MAX_INVITATIONS + 1
            raise Refused(
                f"the token's chain is too long: expected at most {most} links, got {len(self.links) + 1}"
            )
        check_links(self.links, now, revoked)
        if self.links[-1].guest not in (b"", self.member):
            raise Refused(f"the invitation is for {peer_of(self.links[-1].guest)}, not for {self.peer}")
        if self.ids[-1] in revoked:
            raise Refused(f"{self.peer} was revoked by the holder of the swarm's key")
        signer = self.swarm
        for link in self.links:
            if not _is_signed(signer, _signed("invitation", self.swarm, link.body), link.signature):
                raise Refused("an invitation in the token is not signed by its issuer")
            signer = link.key
        if not _is_signed(signer, _signed("member", self.swarm, self.member), self.signature):
            raise Refused("the token is not signed with the invitation's key")


def _links(data: bytes) -> tuple[Link, ...]:
    return tuple(Link.decode(data[at : at + _LINK_BYTES]) for at in range(0, len(data), _LINK_BYTES))


def check_links(links: Sequence[Link], now: float, revoked: Collection[str]) -> None:
    """Check what needs no signature of a chain of invitations; raises Refused, which says why."""
    for before, link in zip((None, *links), links, strict=False):
        if link.end < now:
            raise Refused(f"the invitation ended at {shown_date(link.end)}; ask for a new one")
        if link.id in revoked:
            raise Refused(f"invitation {link.id} was revoked by the holder of the swarm's key")
        if before is not None and not before.may_invite:
            raise Refused("the invitation was issued by a member that may not invite")
        if before is not None and before.role not in ("trainer", link.role):
            raise Refused(f"the invitation gives the role {link.role}, its issuer has only {before.role}")


@dataclass(frozen=True)
class Invitation:
    """What an invitation's line holds; `seed` is the secret half of the last link's key."""

    name: str
    swarm: bytes
    links: tuple[Link, ...]
    seed: bytes
    addresses: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The line that a guest gives to `equipoise join`."""
        links = b"".join(link.body + link.signature for link in self.links)
        told = msgspec.msgpack.encode(_Told(self.name, self.addresses))
        data = bytes([len(self.links)]) + self.swarm + self.seed + links + told
        checked = data + hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]
        return PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")

    def token(self, peer: str, now: float) -> Token:
        """Make the token of `peer`; raises Refused if the invitation has ended, or is for another PeerID."""
        member = public_key_of(peer)
        signature = Ed25519PrivateKey.from_private_bytes(self.seed).sign(
            _signed("member", self.swarm, member)
        )
        token = Token(self.swarm, self.links, member, signature)
        token.check(now, ())
        return token

    def invite(self, seed: bytes, link: Link, addresses: Sequence[str] = ()) -> Invitation:
        """Sign a further `link`, whose key has the secret half `seed`; raises Refused if this one may not invite so.

        It ends no later than this one. Without links this is the swarm itself, and `seed` its key.
        """
        if len(self.links) >= MAX_INVITATIONS:
            raise Refused("an invitation by a member cannot be passed on again; ask its issuer to invite")
        link = replace(link, end=min(link.end, *(one.end for one in self.links), MAX_END))
        check_links((*self.links, link), 0.0, ())
        body = _signed("invitation", self.swarm, link.body)
        signed = replace(link, signature=Ed25519PrivateKey.from_private_bytes(self.seed).sign(body))
        told = tuple(addresses)[:MAX_LINE_ADDRESSES]
        return Invitation(self.name, self.swarm, (*self.links, signed), seed, told)


def parse_invitation(line: str) -> Invitation:
    """Read an invitation's line; raises Refused, which says what to do, if it is damaged or none."""
    line = "".join(line.split())
    if not line.startswith(PREFIX):
        raise Refused(
            f"that is no invitation: expected a line that begins with {PREFIX}; copy the whole line"
        )
    damaged = Refused(
        "the invitation's line is damaged: a character is wrong or missing; copy the whole line again"
    )
    text = line.removeprefix(PREFIX)
    try:
        checked = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except (ValueError, binascii.Error):
        raise damaged from None
    data, checksum = checked[:-_CHECKSUM_BYTES], checked[-_CHECKSUM_BYTES:]
    if len(line) > MAX_LINE or hashlib.sha256(data).digest()[:_CHECKSUM_BYTES] != checksum:
        raise damaged
    return _invitation(data)


def _invitation(data: bytes) -> Invitation:
    count = data[0] if data else 0
    rest = 65 + count * _LINK_BYTES
    if not 1 <= count <= MAX_INVITATIONS or len(data) < rest:
        raise Refused(
            f"the invitation's chain is too long: expected 1 to {MAX_INVITATIONS} invitations, got {count}"
        )
    try:
        told = decode(_told, data[rest:], MAX_LINE, "invitation")
        for address in told.addresses:
            parse_address(address)
    except (Malformed, AddressError) as error:
        raise Refused(f"the invitation is malformed: {error}; ask for a new one") from None
    found = Invitation(told.name, data[1:33], _links(data[65:rest]), data[33:65], told.addresses)
    if public_half(found.seed) != found.links[-1].key:
        raise Refused("the invitation holds the key of another one; ask for a new one")
    return found


def public_half(seed: bytes) -> bytes:
    """Return the public key of a secret one."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


@dataclass(frozen=True)
class Revocations:
    """The signed list of the revoked, by the names of `Token.ids`; of two lists that with the higher number counts."""

    number: int = 0
    ids: frozenset[str] = frozenset()
    signature: bytes = b""

    @property
    def rank(self) -> tuple[int, bytes]:
        """Of two lists the one with the higher rank counts, at all peers alike."""
        return self.number, self.signature

    @property
    def _body(self) -> bytes:
        return _NUMBER.pack(self.number) + b"".join(map(bytes.fromhex, sorted(self.ids)))

    def encode(self) -> bytes:
        """Return its bytes."""
        return self.signature + self._body

    def add(self, seed: bytes, ids: Collection[str]) -> Revocations:
        """Sign the next list with the swarm's key, `seed`."""
        after = Revocations(self.number + 1, self.ids | frozenset(ids))
        if len(after.ids) > MAX_REVOKED:
            raise Refused(
                f"the list of the revoked is full: expected at most {MAX_REVOKED}, got {len(after.ids)}"
            )
        content = _signed("revocations", public_half(seed), after._body)
        return replace(after, signature=Ed25519PrivateKey.from_private_bytes(seed).sign(content))

    @classmethod
    def decode(cls, data: bytes, swarm: bytes) -> Revocations:
        """Read and verify a list; raises Refused if the swarm's key has not signed it."""
        signature, body = data[:64], data[64:]
        count, odd = divmod(len(body) - _NUMBER.size, _ID_BYTES)
        if (
            odd
            or not 0 <= count <= MAX_REVOKED
            or not _is_signed(swarm, _signed("revocations", swarm, body), signature)
        ):
            raise Refused("the list of the revoked is not signed with the swarm's key")
        ids = (body[at : at + _ID_BYTES].hex() for at in range(_NUMBER.size, len(body), _ID_BYTES))
        return cls(_NUMBER.unpack_from(body)[0], frozenset(ids), signature)


class Admission:
    """The peers that one member has admitted.

    Attributes:
        token: This member's own token.
        revocations: The newest list of the revoked.
    """

    def __init__(self, token: Token, revocations: Revocations) -> None:
        self.token = token
        self.revocations = revocations
        self._admitted: LruDict[str, Token] = LruDict(MAX_ADMITTED)
        self._limit = RateLimit(PRESENTATIONS_PER_SECOND, PRESENTATIONS_BURST)

    def admit(self, peer: str, data: bytes, now: float) -> None:
        """Admit `peer`, whose PeerID is proved, until its token ends; raises Refused."""
        known = self._admitted.get(peer)
        token = known if known is not None and known.encode() == data else Token.decode(data)
        if token.swarm != self.token.swarm:
            raise Refused("the token is of another swarm")
        if token.peer != peer:
            raise Refused(f"the token is of another peer, {token.peer}")
        token.check(now, self.revocations.ids)
        self._admitted[peer] = token

    def admit_from(self, host: str, peer: str, data: bytes, now: float, tick: float) -> None:
        """Admit a caller from an address, as `admit`; `tick` is in seconds of a clock that never jumps."""
        if peer not in self._admitted and not self._limit.allow(host, tick):
            raise Refused("too many tokens from this address; wait some seconds")
        self.admit(peer, data, now)

    def check(self, peer: str, now: float) -> Token:
        """Return the token by which `peer` is admitted now; raises Refused if it is not."""
        token = self._admitted.get(peer)
        if token is None:
            raise Refused(UNPRESENTED)
        if token.end < now:
            raise Refused(f"the token of {peer} ended at {shown_date(token.end)}")
        return token

    def token_of(self, peer: str) -> Token | None:
        """Return the token of this member itself, or of a peer that was admitted."""
        return self.token if peer == self.token.peer else self._admitted.get(peer)

    def members(self, now: float) -> list[Token]:
        """Return the tokens of all peers that are admitted now."""
        return [token for token in self._admitted.values() if token.end >= now]

    def expel(self, now: float) -> list[str]:
        """Forget the peers whose tokens have ended or were revoked; return their PeerIDs."""
        revoked = self.revocations.ids
        out = [
            peer for peer, one in self._admitted.items() if one.end < now or not revoked.isdisjoint(one.ids)
        ]
        for peer in out:
            del self._admitted[peer]
        return out
