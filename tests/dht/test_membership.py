"""The files of private swarms in a home."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from equipoise.dht.admission import Invitation, Link, Refused, Revocations, id_of, public_half
from equipoise.dht.identity import load_or_create
from equipoise.dht.membership import Membership, ban, bans, revoked_by
from equipoise.dht.options import names

NOW = 1_700_000_000.0
SEED, OTHER = bytes([1]) * 32, bytes([2]) * 32
OFFER = Link(bytes(32), "trainer", int(NOW) + 3600)


@pytest.fixture
def founder(tmp_path: Path) -> Membership:
    return Membership.create(tmp_path / "founder", "friends")


def test_a_founder_keeps_the_key_for_itself_alone_and_is_a_member_again(
    tmp_path: Path, founder: Membership
) -> None:
    home = tmp_path / "founder"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (home / "swarms").iterdir()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (home, home / "swarms")} == {0o700}
    assert public_half(founder.key) == founder.invitation.swarm
    assert Membership.load(home, "friends", NOW) == founder
    assert founder.token(home, NOW).peer == load_or_create(home).peer
    assert Membership.redeem(home, founder.invitation.line, NOW) == founder, "it stays its founder"
    with pytest.raises(Refused, match="has a swarm friends already"):
        Membership.create(home, "friends")
    for name in ("", "..", "a/b", "x" * 33, ".hidden"):
        with pytest.raises(Refused, match="expected a name"):
            Membership.create(home, name)


def test_a_guest_keeps_its_invitation_and_may_pass_it_on_if_allowed(
    tmp_path: Path, founder: Membership
) -> None:
    home = tmp_path / "guest"
    plain = Membership.redeem(home, founder.invite(OFFER, SEED, ()).line, NOW)
    assert names(home) == ["friends"]
    with pytest.raises(Refused, match="may not invite"):
        plain.invite(OFFER, OTHER, ())
    with pytest.raises(Refused, match="ask its founder"):
        plain.revoke(home, ["00" * 16])
    host = Membership.redeem(home, founder.invite(replace(OFFER, may_invite=True), SEED, ()).line, NOW)
    further = Membership.redeem(tmp_path / "third", host.invite(OFFER, OTHER, ()).line, NOW)
    links = further.token(tmp_path / "third", NOW).links
    assert [link.id for link in links] == [host.invitation.links[0].id, id_of(public_half(OTHER))]


def test_a_home_is_in_one_swarm_of_a_name(tmp_path: Path, founder: Membership) -> None:
    stranger = Invitation("friends", public_half(OTHER), (), OTHER).invite(SEED, OFFER)
    with pytest.raises(Refused, match="another swarm friends"):
        Membership.redeem(tmp_path / "founder", stranger.line, NOW)
    with pytest.raises(Refused, match="has not joined a swarm 'labs'"):
        Membership.load(tmp_path / "founder", "labs", NOW)
    assert Membership.load(tmp_path / "founder", "friends", NOW) == founder


def test_the_revoked_are_kept_and_cannot_load(tmp_path: Path, founder: Membership) -> None:
    home, own = tmp_path / "guest", tmp_path / "founder"
    guest = Membership.redeem(home, founder.invite(OFFER, SEED, ()).line, NOW)
    token = guest.token(home, NOW)
    ids = revoked_by(token.peer, [token, founder.token(own, NOW)])
    assert ids == [token.ids[-1], token.links[-1].id], "the peer, and the invitation by which it came"
    assert revoked_by("0f" * 16, ()) == ["0f" * 16]
    news = founder.revoke(own, ids)
    assert Membership.load(own, "friends", NOW).revocations == news
    assert Revocations.decode(news.encode(), founder.invitation.swarm) == news
    guest.revocations = news
    guest.save(home)
    with pytest.raises(Refused, match="was revoked"):
        Membership.load(home, "friends", NOW)
    with pytest.raises(Refused, match="was revoked"):
        Membership.redeem(home, guest.invitation.line, NOW)
    (home / "swarms" / "friends").write_bytes(b"x")
    with pytest.raises(Refused, match="restore it, or remove it"):
        Membership.load(home, "friends", NOW)
    for wrong in ("", "0f" * 15, "12D3KooW"):
        with pytest.raises(Refused, match="expected a PeerID"):
            revoked_by(wrong, ())


def test_a_founder_does_not_revoke_itself(tmp_path: Path, founder: Membership) -> None:
    home = tmp_path / "founder"
    for id in founder.token(home, NOW).ids:
        with pytest.raises(Refused, match="this home itself"):
            founder.revoke(home, [id])


def test_bans_are_kept_in_the_home_until_they_are_lifted(tmp_path: Path) -> None:
    peer, own = (load_or_create(tmp_path / name).peer for name in ("other", "own"))
    home = tmp_path / "own"
    assert bans(home) == {}
    assert ban(home, peer, "noise\n") == bans(home) == {peer: "noise\\n"}
    assert stat.S_IMODE((home / "banned.json").stat().st_mode) == 0o600
    for wrong, why in ((own, "this daemon itself"), ("x", "expected an Ed25519 PeerID")):
        with pytest.raises(Refused, match=why):
            ban(home, wrong, "")
    assert ban(home, peer, None) == bans(home) == {}
    with pytest.raises(Refused, match="not banned here"):
        ban(home, peer, None)
    (home / "banned.json").write_text("[1]")
    with pytest.raises(Refused, match="remove it to lift all bans"):
        bans(home)
