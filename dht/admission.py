"""Admission of peers: keys, invitations and tokens of a private swarm, the revoked, the banned. Sans IO.

A swarm is an Ed25519 key. Its holder signs the key of an invitation, with a role and an end; a guest signs its own
PeerID with the invitation's key, which travels in the invitation's line. The chain of both signatures is the guest's
token, which anybody verifies offline. A guest that may invite signs a further invitation with the key of its own.

Everything is a msgpack array. `now` is in seconds since 1970, as `time.time`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import time
from collections.abc import Collection, Sequence
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from equipoise.dht.identity import message, peer_of, public_key_of, verify
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
MAX_LIST_BYTES = 128 * 1024
PRESENTATIONS_PER_SECOND, PRESENTATIONS_BURST = 5.0, 60.0
"""Most tokens verified for one address. Behind the router of a laboratory some dozens of daemons start at once."""

NAME_PATTERN = r"\A[A-Za-z0-9_-][A-Za-z0-9_.-]{0,31}\Z"
PREFIX = "equipoise:"
UNPRESENTED = "it has presented no token to this daemon"
"""Why a peer is refused that may have presented its token before this daemon was started again."""
_CHECKSUM_BYTES = 6
_ID_BYTES = 16

_T = TypeVar("_T")
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Id = Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-f]{{{2 * _ID_BYTES}}}\Z")]
"""The name of an invitation or a peer, by which it is revoked: the first half of its key."""


class Refused(ConnectionError):
    """A token, an invitation or a peer is refused; the message says why, in one line, `why` its category."""

    why = "not a member"


def read(
    decoder: msgspec.msgpack.Decoder[_T], data: bytes, limit: int, what: str, hint: str = "ask for a new one"
) -> _T:
    """Decode a value as `sanitize.decode`; raises Refused, which ends with the hint, if it is malformed."""
    try:
        return decode(decoder, data, limit, what)
    except Malformed as error:
        raise Refused(f"{error}; {hint}") from None


class Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An invitation as its issuer has signed it.

    `key` is its public key, `end` its last second, `guest` the public key of the only PeerID that it admits, or empty.
    """

    key: Key
    role: Role
    end: Annotated[int, msgspec.Meta(ge=0, le=MAX_END)]
    guest: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    may_invite: bool = False
    signature: bytes = b""

    @property
    def id(self) -> str:
        """Its name for people, by which it is revoked."""
        return id_of(self.key)

    @property
    def body(self) -> bytes:
        """What is signed."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self, signature=b""))


class Token(msgspec.Struct, frozen=True):
    """The chain from a swarm's public key to one PeerID. Only the links and the last signature travel."""

    swarm: bytes
    peer: str
    links: tuple[Link, ...]
    signature: bytes

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
        return (*(link.id for link in self.links), id_of(public_key_of(self.peer)))

    def encode(self) -> bytes:
        """Return its bytes, fewer than `MAX_TOKEN_BYTES`."""
        return msgspec.msgpack.encode((self.links, self.signature))

    @classmethod
    def decode(cls, swarm: bytes, peer: str, data: bytes) -> Token:
        """Read the token that `peer` presents in a swarm, without verifying it; raises Refused if it is malformed."""
        return cls(swarm, peer, *read(chains, data, MAX_TOKEN_BYTES, "token"))

    def check(self, now: float, revoked: Collection[str]) -> None:
        """Verify the token; raises Refused, which says why, if it is no good now.

        Signatures come last, from the swarm's on, so a forged token costs one verification.
        """
        check_links(self.links, now, revoked)
        member = public_key_of(self.peer)
        if self.links[-1].guest not in (b"", member):
            raise Refused(f"the invitation is for {peer_of(self.links[-1].guest)}, not for {self.peer}")
        if id_of(member) in revoked:
            raise Refused(f"{self.peer} was revoked by the holder of the swarm's key")
        signer = self.swarm
        for link in self.links:
            if not _is_signed(signer, "invitation", self.swarm + link.body, link.signature):
                raise Refused(
                    "an invitation in the token is not signed by its issuer, or is of another swarm"
                )
            signer = link.key
        if not _is_signed(signer, "member", self.swarm + member, self.signature):
            raise Refused(
                "the token is of another peer: it is not signed with the invitation's key for this one"
            )


def check_links(links: Sequence[Link], now: float, revoked: Collection[str]) -> None:
    """Check what needs no signature of a chain of invitations; raises Refused, which says why."""
    if not 1 <= len(links) <= MAX_INVITATIONS:
        most = f"expected 1 to {MAX_INVITATIONS} invitations, got {len(links)}"
        raise Refused(f"the chain is too long: {most}; ask the issuer of yours to invite")
    for before, link in zip((None, *links), links, strict=False):
        if link.end < now:
            ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(link.end))
            raise Refused(f"the invitation ended at {ended}; ask for a new one")
        if link.id in revoked:
            raise Refused(f"invitation {link.id} was revoked by the holder of the swarm's key")
        if before is not None and not before.may_invite:
            raise Refused("the invitation was issued by a member that may not invite")
        if before is not None and before.role not in ("trainer", link.role):
            raise Refused(f"the invitation gives the role {link.role}, its issuer has only {before.role}")


class Invitation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an invitation's line holds: `seed` is the secret half of the last link's key; nobody signs the rest."""

    name: Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
    swarm: Key
    links: tuple[Link, ...]
    seed: Key
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=512)], ...], msgspec.Meta(max_length=MAX_LINE_ADDRESSES)
    ] = ()

    @property
    def line(self) -> str:
        """The line that a guest gives to `equipoise join`."""
        data = msgspec.msgpack.encode(self)
        return PREFIX + base64.urlsafe_b64encode(data + _checksum(data)).decode().rstrip("=")

    def token(self, peer: str, now: float, revoked: Collection[str] = ()) -> Token:
        """Make the token of `peer`; raises Refused if it would be no good now."""
        signature = _sign(self.seed, "member", self.swarm + public_key_of(peer))
        token = Token(self.swarm, peer, self.links, signature)
        token.check(now, revoked)
        return token

    def invite(self, seed: bytes, link: Link, addresses: Sequence[str] = ()) -> Invitation:
        """Sign a further `link`, whose key has the secret half `seed`; raises Refused if this one may not invite so.

        It ends no later than this one. Without links this is the swarm itself, and `seed` its key.
        """
        end = min(link.end, *(one.end for one in self.links), MAX_END)
        link = msgspec.structs.replace(link, key=public_half(seed), end=end)
        check_links((*self.links, link), 0.0, ())
        signature = _sign(self.seed, "invitation", self.swarm + link.body)
        links = (*self.links, msgspec.structs.replace(link, signature=signature))
        return Invitation(self.name, self.swarm, links, seed, tuple(addresses)[:MAX_LINE_ADDRESSES])


class Revocations(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """The signed list of the revoked, by the names of `Token.ids`; of two lists the greater counts, at all peers."""

    number: Annotated[int, msgspec.Meta(ge=0)] = 0
    ids: Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_REVOKED)] = ()
    signature: bytes = b""

    def encode(self) -> bytes:
        """Return its bytes."""
        return msgspec.msgpack.encode(self)

    def add(self, seed: bytes, ids: Collection[str]) -> Revocations:
        """Sign the next list with the swarm's key, `seed`; raises Refused if it is full."""
        after = Revocations(self.number + 1, tuple(sorted({*self.ids, *ids})))
        if len(after.ids) > MAX_REVOKED:
            raise Refused(f"the list of the revoked is full: expected at most {MAX_REVOKED}, got one more")
        signature = _sign(seed, "revocations", public_half(seed) + after.encode())
        return msgspec.structs.replace(after, signature=signature)

    @classmethod
    def decode(cls, data: bytes, swarm: bytes) -> Revocations:
        """Read and verify a list; raises Refused if the swarm's key has not signed it."""
        found = read(lists, data, MAX_LIST_BYTES, "list of the revoked")
        if not found.number:
            return cls()
        body = swarm + cls(found.number, found.ids).encode()
        if not _is_signed(swarm, "revocations", body, found.signature):
            raise Refused("the list of the revoked is not signed with the swarm's key")
        return found


chains = msgspec.msgpack.Decoder(tuple[tuple[Link, ...], bytes])
invitations = msgspec.msgpack.Decoder(Invitation)
lists = msgspec.msgpack.Decoder(Revocations)


def parse_invitation(line: str) -> Invitation:
    """Read an invitation's line; raises Refused, which says what to do, if it is damaged or none."""
    line = "".join(line.split())
    if not line.startswith(PREFIX):
        raise Refused(
            f"that is no invitation: expected a line that begins with {PREFIX}; copy the whole line"
        )
    text, checked = line.removeprefix(PREFIX), b""
    with contextlib.suppress(ValueError):
        checked = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    data, checksum = checked[:-_CHECKSUM_BYTES], checked[-_CHECKSUM_BYTES:]
    if len(line) > MAX_LINE or _checksum(data) != checksum:
        damage = "a character is wrong or missing"
        raise Refused(f"the invitation's line is damaged: {damage}; copy the whole line again")
    return read(invitations, data, MAX_LINE, "invitation")


def public_half(seed: bytes) -> bytes:
    """Return the public key of a secret one."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def id_of(key: bytes) -> str:
    """Return the name by which the holder of a public key is revoked."""
    return key[:_ID_BYTES].hex()


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]


def _sign(seed: bytes, kind: str, data: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).sign(message(f"swarm/{kind}", data))


def _is_signed(key: bytes, kind: str, data: bytes, signature: bytes) -> bool:
    return verify(peer_of(key), f"swarm/{kind}", data, signature)


class Admission:
    """The peers that this daemon lets in: in a private swarm by their tokens, in an open one all; never the banned.

    Attributes:
        token: This member's own token; None in an open swarm.
        revocations: The newest list of the revoked.
        banned: The reasons for which this daemon alone refuses peers, by PeerID.
    """

    def __init__(
        self,
        token: Token | None = None,
        revocations: Revocations | None = None,
        banned: dict[str, str] | None = None,
    ) -> None:
        self.token = token
        self.revocations = revocations or Revocations()
        self.banned = banned or {}
        self._admitted: LruDict[str, Token] = LruDict(MAX_ADMITTED)
        self._limit = RateLimit(PRESENTATIONS_PER_SECOND, PRESENTATIONS_BURST)

    def admit(self, peer: str, data: bytes, now: float, host: str | None = None, tick: float = 0.0) -> None:
        """Admit `peer`, whose PeerID is proved, until its token ends; raises Refused.

        A caller comes from `host`, whose tokens are bounded; `tick` is in seconds of a clock that never jumps.
        """
        self.welcome(peer)
        known = self._admitted.get(peer)
        if known is not None and known.encode() == data:
            return
        if host is not None and not self._limit.allow(host, tick):
            raise Refused("too many tokens from this address; wait some seconds")
        token = Token.decode(b"" if self.token is None else self.token.swarm, peer, data)
        token.check(now, self.revocations.ids)
        self._admitted[peer] = token

    def welcome(self, peer: str) -> None:
        """Raise Refused if `peer` is banned."""
        if peer in self.banned:
            raise Refused("this daemon has banned that peer; to lift it: equipoise allow PEER")

    def check(self, peer: str, now: float) -> None:
        """Raise Refused unless `peer` is admitted now."""
        self.welcome(peer)
        if self.token is None:
            return
        token = self._admitted.get(peer)
        if token is None:
            raise Refused(UNPRESENTED)
        if token.end < now:
            raise Refused("its token has ended; it needs a new invitation")

    def role(self, peer: str) -> Role:
        """Return the role of this member or of an admitted peer; those whom a stranger meets judge it."""
        own = self.token is not None and peer == self.token.peer
        token = self.token if own else self._admitted.get(peer)
        return "trainer" if token is None else token.role

    def members(self, now: float) -> list[Token]:
        """Return the tokens of all peers that are admitted now."""
        return [token for token in self._admitted.values() if token.end >= now]

    def expel(self, now: float) -> list[str]:
        """Forget the peers whose tokens have ended or were revoked; return their PeerIDs."""
        revoked = frozenset(self.revocations.ids)
        out = [peer for peer, one in self._admitted.items() if one.end < now or revoked & {*one.ids}]
        for peer in out:
            del self._admitted[peer]
        return out
