"""What a home keeps of its swarms: memberships of private ones with the founder's key, and the peers that it bans."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from equipoise.dht.admission import (
    MAX_END,
    MAX_LIST_BYTES,
    NAME_PATTERN,
    Invitation,
    Link,
    Refused,
    Revocations,
    Token,
    id_of,
    parse_invitation,
    public_half,
    read,
)
from equipoise.dht.identity import load_or_create, public_key_of, read_private, write_private
from equipoise.dht.options import FOLDER, names
from equipoise.dht.sanitize import printable

BANS_FILE = "banned.json"
MAX_BANS = 4096
MAX_FILE_BYTES = 4 * MAX_LIST_BYTES


class Membership(msgspec.Struct, array_like=True):
    """One home's membership in one private swarm, which a file of the home holds.

    Attributes:
        invitation: The invitation by which this home is a member.
        key: The swarm's own secret key; empty in the homes of all but its founder.
        revocations: The newest list of the revoked that it has seen.
    """

    invitation: Invitation
    key: bytes = b""
    revocations: Revocations = Revocations()

    @classmethod
    def create(cls, home: Path, name: str) -> Membership:
        """Make a swarm, whose first member this home is; raises Refused if it has one of that name."""
        if re.match(NAME_PATTERN, name) is None:
            form = "1 to 32 letters, digits, dots, dashes or underscores"
            raise Refused(f"expected a name of {form}, got {name[:64]!r}")
        if name in names(home):
            raise Refused(
                f"this home has a swarm {name} already; use another name, or see: equipoise swarm show"
            )
        key, guest = secrets.token_bytes(32), public_key_of(load_or_create(home).peer)
        link = Link(bytes(32), "trainer", MAX_END, guest, may_invite=True)
        own = cls(Invitation(name, public_half(key), (), key).invite(secrets.token_bytes(32), link), key)
        own.save(home)
        return own

    @classmethod
    def redeem(cls, home: Path, line: str, now: float) -> Membership:
        """Make this home a member by an invitation, and keep that; raises Refused."""
        own = cls(parse_invitation(line))
        if own.invitation.name in names(home):
            kept = cls._read(home, own.invitation.name)
            if kept.invitation.swarm != own.invitation.swarm:
                raise Refused(
                    f"this home has another swarm {own.invitation.name} already; give another --home"
                )
            own.key, own.revocations = kept.key, kept.revocations
        own.token(home, now)
        own.save(home)
        return own

    @classmethod
    def load(cls, home: Path, name: str, now: float) -> Membership:
        """Return the membership in a swarm that this home has joined; raises Refused if it has not, or it has ended."""
        if name not in (known := names(home)):
            have = f"it has joined {', '.join(known)}" if known else "it has joined none"
            raise Refused(
                f"this home has not joined a swarm {name[:64]!r} ({have}); join one with: equipoise join LINE"
            )
        own = cls._read(home, name)
        own.token(home, now)
        return own

    @classmethod
    def _read(cls, home: Path, name: str) -> Membership:
        path, hint = home / FOLDER / name, "restore it, or remove it and join again"
        try:
            data = read_private(path, MAX_FILE_BYTES)
        except OSError as error:
            raise Refused(f"{path}: {error}; {hint}") from None
        return read(memberships, data, MAX_FILE_BYTES, f"file {path}", hint)

    def save(self, home: Path) -> None:
        """Keep it in the home."""
        write_private(home / FOLDER / self.invitation.name, msgspec.msgpack.encode(self))

    def token(self, home: Path, now: float) -> Token:
        """Return this home's token; raises Refused if it is no good now."""
        return self.invitation.token(load_or_create(home).peer, now, self.revocations.ids)

    def invite(self, link: Link, seed: bytes, addresses: Sequence[str]) -> Invitation:
        """Issue an invitation, as the swarm itself if its key is here; raises Refused if this home may not."""
        issuer = self.invitation
        if self.key:
            issuer = Invitation(issuer.name, issuer.swarm, (), self.key)
        return issuer.invite(seed, link, addresses)

    def revoke(self, home: Path, ids: Collection[str]) -> Revocations:
        """Sign the next list of the revoked, and keep it; raises Refused if the swarm's key is not here."""
        name, own = self.invitation.name, self.token(home, 0.0).ids
        if not self.key:
            raise Refused(f"the key of swarm {name} is not in this home; ask its founder")
        if not frozenset(own).isdisjoint(ids):
            me = "that is this home itself, or the invitation by which it is a member"
            raise Refused(f"{me}; nothing was revoked")
        self.revocations = self.revocations.add(self.key, ids)
        self.save(home)
        return self.revocations


memberships = msgspec.msgpack.Decoder(Membership)
reasons = msgspec.json.Decoder(dict[str, str])


def revoked_by(target: str, members: Collection[Token]) -> list[str]:
    """Return the names on the list of the revoked for a PeerID, or for an invitation; raises Refused if it is neither.

    With a peer goes the invitation by which it came, so that it does not come back with a new PeerID.
    """
    if re.fullmatch(r"[0-9a-f]{32}", target):
        return [target]
    try:
        own = id_of(public_key_of(target))
    except ValueError as error:
        raise Refused(f"expected a PeerID, or the 32 hex digits of an invitation: {error}") from None
    return [own, *(token.links[-1].id for token in members if token.peer == target)]


def bans(home: Path) -> dict[str, str]:
    """Return the reasons for which this home bans peers, by PeerID; raises Refused if they cannot be read."""
    path = home / BANS_FILE
    try:
        return reasons.decode(read_private(path, MAX_FILE_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise Refused(f"{path}: {error}; correct it, or remove it to lift all bans") from None


def ban(home: Path, peer: str, reason: str | None) -> dict[str, str]:
    """Keep the ban of a peer, or lift it if the reason is None; return all bans. Raises Refused."""
    found = bans(home)
    if reason is None and found.pop(peer, None) is None:
        raise Refused(f"{peer[:64]!r} is not banned here")
    if reason is not None:
        try:
            public_key_of(peer)
        except ValueError as error:
            raise Refused(str(error)) from None
        if peer == load_or_create(home).peer:
            raise Refused("that is this daemon itself; nothing was banned")
        if len(found) >= MAX_BANS:
            raise Refused(
                f"{MAX_BANS} peers are banned here, the maximum; lift one with: equipoise allow PEER"
            )
        found[peer] = printable(reason)
    write_private(home / BANS_FILE, msgspec.json.format(msgspec.json.encode(found)))
    return found
