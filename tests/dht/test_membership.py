"""The files of private swarms in a home."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise.dht.admission import Invitation, Link, Refused, Revocations, public_half
from equipoise.dht.identity import load_or_create
from equipoise.dht.membership import Membership, names, revoked_by

NOW = 1_700_000_000.0
SEED, OTHER = bytes([1]) * 32, bytes([2]) * 32
OFFER = Link(b"", "trainer", int(NOW) + 3600)


@pytest.fixture
def founder(tmp_path: Path) -> Membership:
    return Membership.create(tmp_path / "founder", "friends", NOW)


def test_a_founder_keeps_the_key_for_itself_alone_and_is_a_member_again(
    tmp_path: Path, founder: Membership
) -> None:
    home = tmp_path / "founder"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (home / "swarms").iterdir()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (home, home / "swarms")} == {0o700}
    assert public_half(founder.seed) == founder.token.swarm
    assert Membership.load(home, "friends", NOW).token == founder.token
    assert founder.token.peer == load_or_create(home).peer
    with pytest.raises(Refused, match="has a swarm friends already"):
        Membership.create(home, "friends", NOW)
    for name in ("", "..", "a/b", "x" * 33, ".hidden"):
        with pytest.raises(Refused, match="expected a name"):
            Membership.create(home, name, NOW)


def test_a_guest_keeps_its_invitation_and_may_pass_it_on_if_allowed(
    tmp_path: Path, founder: Membership
) -> None:
    home = tmp_path / "guest"
    plain = Membership.redeem(home, founder.invite(OFFER, SEED, ()).line, NOW)
    assert (names(home), plain.name) == (["friends"], "friends")
    with pytest.raises(Refused, match="may not invite"):
        plain.invite(OFFER, OTHER, ())
    with pytest.raises(Refused, match="ask its founder"):
        plain.revoke(["00" * 16])
    host = Membership.redeem(home, founder.invite(replace(OFFER, may_invite=True), SEED, ()).line, NOW)
    further = Membership.redeem(tmp_path / "third", host.invite(OFFER, OTHER, ()).line, NOW)
    assert [link.id for link in further.token.links] == [
        host.token.links[0].id,
        public_half(OTHER)[:16].hex(),
    ]
    further.token.check(NOW, ())


def test_a_home_is_in_one_swarm_of_a_name(tmp_path: Path, founder: Membership) -> None:
    stranger = Invitation("friends", public_half(OTHER), (), OTHER).invite(
        SEED, replace(OFFER, key=public_half(SEED))
    )
    with pytest.raises(Refused, match="another swarm friends"):
        Membership.redeem(tmp_path / "founder", stranger.line, NOW)
    with pytest.raises(Refused, match="has not joined a swarm 'labs'"):
        Membership.load(tmp_path / "founder", "labs", NOW)
    assert Membership.load(tmp_path / "founder", "friends", NOW).token == founder.token


def test_the_revoked_are_kept_and_cannot_load(tmp_path: Path, founder: Membership) -> None:
    guest = Membership.redeem(tmp_path / "guest", founder.invite(OFFER, SEED, ()).line, NOW)
    ids = revoked_by(guest.token.peer, [guest.token, founder.token])
    assert ids == [guest.token.ids[-1], guest.token.links[-1].id], (
        "the peer, and the invitation by which it came"
    )
    assert revoked_by("0f" * 16, ()) == ["0f" * 16]
    news = founder.revoke(ids)
    assert Membership.load(tmp_path / "founder", "friends", NOW).revocations == news
    assert Revocations.decode(news.encode(), founder.token.swarm) == news
    guest.keep(news.encode())
    with pytest.raises(Refused, match="was revoked"):
        Membership.load(tmp_path / "guest", "friends", NOW)
    for wrong in ("", "0f" * 15, "12D3KooW"):
        with pytest.raises(Refused, match="expected a PeerID"):
            revoked_by(wrong, ())


def test_a_founder_does_not_revoke_itself(founder: Membership) -> None:
    for id in founder.token.ids:
        with pytest.raises(Refused, match="this home itself"):
            founder.revoke([id])
