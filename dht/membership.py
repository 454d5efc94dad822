"""A home's memberships in private swarms: an invitation's line, the swarm's key of its founder, and who is revoked."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from equipoise.dht.admission import (
    MAX_END,
    MAX_LINE,
    NAME_PATTERN,
    Admission,
    Invitation,
    Link,
    Refused,
    Revocations,
    Token,
    parse_invitation,
    public_half,
)
from equipoise.dht.identity import load_or_create, public_key_of, read_private

FOLDER = "swarms"
MAX_FILE_BYTES = 64 * 1024


@dataclass
class Membership:
    """One home's membership in one swarm.

    Attributes:
        folder: Directory of `NAME.key` (the founder's), `NAME.invitation` and `NAME.revoked`.
        invitation: The invitation by which this home is a member.
        token: Its token.
        revocations: The newest list of the revoked that it has seen.
    """

    folder: Path
    invitation: Invitation
    token: Token
    revocations: Revocations

    @property
    def name(self) -> str:
        """What people call the swarm."""
        return self.invitation.name

    @property
    def seed(self) -> bytes:
        """The swarm's own key; raises Refused if this home has it not."""
        path = self.folder / f"{self.name}.key"
        if not path.exists():
            raise Refused(f"the key of swarm {self.name} is not in this home; ask its founder")
        return read_private(path, 32)

    @classmethod
    def create(cls, home: Path, name: str, now: float) -> Membership:
        """Make a swarm, whose first member this home is; raises Refused if it has one of that name."""
        if re.match(NAME_PATTERN, name) is None:
            raise Refused(
                f"expected a name of 1 to 32 letters, digits, dots, dashes or underscores, got {name[:64]!r}"
            )
        if name in names(home):
            raise Refused(
                f"this home has a swarm {name} already; use another name, or see: equipoise swarm show"
            )
        guest, seed, own = (
            public_key_of(load_or_create(home).peer),
            secrets.token_bytes(32),
            secrets.token_bytes(32),
        )
        root = Invitation(name, public_half(seed), (), seed)
        first = root.invite(own, Link(public_half(own), "trainer", MAX_END, guest, may_invite=True))
        _write(home / FOLDER / f"{name}.key", seed)
        return cls.redeem(home, first.line, now)

    @classmethod
    def redeem(cls, home: Path, line: str, now: float) -> Membership:
        """Make this home a member by an invitation, and keep that; raises Refused."""
        invitation = parse_invitation(line)
        invitation.token(load_or_create(home).peer, now)
        name = invitation.name
        if name in names(home) and _kept(home, name).swarm != invitation.swarm:
            raise Refused(f"this home has another swarm {name} already; give another --home")
        _write(home / FOLDER / f"{name}.invitation", invitation.line.encode())
        return cls.load(home, name, now)

    @classmethod
    def load(cls, home: Path, name: str, now: float) -> Membership:
        """Return the membership in a swarm that this home has joined; raises Refused if it has not, or it has ended."""
        if name not in (known := names(home)):
            have = f"it has joined {', '.join(known)}" if known else "it has joined none"
            raise Refused(
                f"this home has not joined a swarm {name[:64]!r} ({have}); join one with: equipoise join LINE"
            )
        invitation, revocations = _kept(home, name), Revocations()
        if (path := home / FOLDER / f"{name}.revoked").exists():
            revocations = Revocations.decode(read_private(path, MAX_FILE_BYTES), invitation.swarm)
        token = invitation.token(load_or_create(home).peer, now)
        token.check(now, revocations.ids)
        return cls(home / FOLDER, invitation, token, revocations)

    def admission(self) -> Admission:
        """Return the state of a gate that admits members of this swarm."""
        return Admission(self.token, self.revocations)

    def keep(self, data: bytes) -> None:
        """Keep a list of the revoked, which was verified."""
        _write(self.folder / f"{self.name}.revoked", data)

    def invite(self, link: Link, seed: bytes, addresses: Sequence[str]) -> Invitation:
        """Issue an invitation, as the swarm itself if its key is here; raises Refused if this home may not."""
        issuer = self.invitation
        if (self.folder / f"{self.name}.key").exists():
            issuer = Invitation(self.name, self.token.swarm, (), self.seed)
        return issuer.invite(seed, replace(link, key=public_half(seed)), addresses)

    def revoke(self, ids: Collection[str]) -> Revocations:
        """Sign the next list of the revoked, and keep it; raises Refused if the swarm's key is not here."""
        if not frozenset(self.token.ids).isdisjoint(ids):
            raise Refused(
                "that is this home itself, or the invitation by which it is a member; nothing was revoked"
            )
        self.revocations = self.revocations.add(self.seed, ids)
        self.keep(self.revocations.encode())
        return self.revocations


def revoked_by(target: str, members: Collection[Token]) -> list[str]:
    """Return the names on the list of the revoked for a PeerID, or for an invitation; raises Refused if it is neither.

    With a peer goes the invitation by which it came, so that it does not come back with a new PeerID.
    """
    if re.fullmatch(r"[0-9a-f]{32}", target):
        return [target]
    try:
        own = public_key_of(target)[:16].hex()
    except ValueError as error:
        raise Refused(f"expected a PeerID, or the 32 hex digits of an invitation: {error}") from None
    return [own, *(token.links[-1].id for token in members if token.peer == target)]


def names(home: Path) -> list[str]:
    """Return the names of the swarms that `home` has joined."""
    return sorted(path.stem for path in (home / FOLDER).glob("*.invitation"))


def _kept(home: Path, name: str) -> Invitation:
    return parse_invitation(
        read_private(home / FOLDER / f"{name}.invitation", MAX_LINE).decode(errors="replace")
    )


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    temporary.replace(path)
