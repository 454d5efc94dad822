"""Keys, invitations and tokens of private swarms, without a network."""

from __future__ import annotations

import string

import pytest
from msgspec.structs import replace

from equipoise.dht.admission import (
    MAX_TOKEN_BYTES,
    PRESENTATIONS_BURST,
    UNPRESENTED,
    Admission,
    Invitation,
    Link,
    Refused,
    Revocations,
    Token,
    parse_invitation,
    public_half,
)
from equipoise.dht.identity import peer_of, public_key_of

NOW = 1_700_000_000.0
DAY = 86_400
SEED, FIRST, SECOND, THIRD = (bytes([number]) * 32 for number in (1, 2, 3, 4))
ALICE, BOB = (peer_of(public_half(bytes([number]) * 32)) for number in (11, 12))
ROOT = Invitation("friends", public_half(SEED), (), SEED)
ADDRESS = f"/ip4/192.0.2.7/tcp/31337/p2p/{ALICE}"


def offer(
    seed: bytes = FIRST, role="trainer", days: int = 30, guest: str = "", may_invite: bool = False
) -> Link:
    only = public_key_of(guest) if guest else b""
    return Link(public_half(seed), role, int(NOW) + days * DAY, only, may_invite)


def invited(**changes) -> Invitation:
    return ROOT.invite(FIRST, offer(**changes), [ADDRESS])


def further(role="trainer", by="trainer", days: int = 30) -> Invitation:
    return invited(may_invite=True, role=by).invite(SECOND, offer(SECOND, role, days), [])


def refusal(token: Token, now: float = NOW, revoked=()) -> str:
    with pytest.raises(Refused) as refused:
        token.check(now, revoked)
    return str(refused.value)


def test_a_line_holds_the_invitation() -> None:
    made = invited(role="observer", guest=ALICE, may_invite=True)
    assert parse_invitation(made.line) == made
    assert parse_invitation(f"  {made.line[:60]}\n{made.line[60:]}\n") == made, "mail programs fold lines"
    assert (made.links[0].role, made.addresses, made.name) == ("observer", (ADDRESS,), "friends")


def test_a_wrong_character_is_found_wherever_it_is() -> None:
    line = invited().line
    for place in range(len("equipoise:"), len(line), 7):
        for other in ("A", "b", "_", "!"):
            if line[place] != other:
                with pytest.raises(Refused, match="damaged"):
                    parse_invitation(line[:place] + other + line[place + 1 :])
    for cut in (line[:-1], line[: len(line) // 2], "equipoise:"):
        with pytest.raises(Refused, match="damaged"):
            parse_invitation(cut)
    for other in ("", "hello", string.printable, "equipoise;" + line):
        with pytest.raises(Refused, match="no invitation"):
            parse_invitation(other)


@pytest.mark.parametrize("made", [invited(), further()], ids=["by the swarm", "by a member"])
def test_a_token_is_short_and_verified_by_anybody(made: Invitation) -> None:
    token = made.token(ALICE, NOW)
    assert len(token.encode()) < MAX_TOKEN_BYTES
    again = Token.decode(public_half(SEED), ALICE, token.encode())
    again.check(NOW, ())
    assert again == token
    assert again.role == "trainer"


def test_what_has_ended_is_refused_at_both_ends() -> None:
    made = invited(days=1)
    token = made.token(ALICE, NOW)
    assert "ended at 2023-11-15" in refusal(token, NOW + DAY + 1)
    with pytest.raises(Refused, match="ask for a new one"):
        made.token(ALICE, NOW + DAY + 1)


def test_an_invitation_for_one_peer_admits_no_other() -> None:
    made = invited(guest=ALICE)
    made.token(ALICE, NOW).check(NOW, ())
    with pytest.raises(Refused, match=f"for {ALICE}, not for {BOB}"):
        made.token(BOB, NOW)


def test_anything_altered_is_refused() -> None:
    data = bytearray(further().token(ALICE, NOW).encode())
    for place in range(0, len(data), 11):
        data[place] ^= 1
        with pytest.raises(Refused):
            Token.decode(public_half(SEED), ALICE, bytes(data)).check(NOW, ())
        data[place] ^= 1
    Token.decode(public_half(SEED), ALICE, bytes(data)).check(NOW, ())


def test_a_chain_of_more_than_three_links_is_refused() -> None:
    second = further()
    with pytest.raises(Refused, match="too long"):
        second.invite(THIRD, offer(THIRD))
    token = second.token(ALICE, NOW)
    longer = replace(token, links=(*token.links, offer(THIRD)))
    assert "too long" in refusal(Token.decode(token.swarm, ALICE, longer.encode()))


def test_a_member_without_leave_invites_nobody() -> None:
    with pytest.raises(Refused, match="may not invite"):
        invited().invite(SECOND, offer(SECOND))


@pytest.mark.parametrize(
    ("by", "role", "fits"),
    [
        ("trainer", "observer", True),
        ("trainer", "relay", True),
        ("observer", "observer", True),
        ("observer", "trainer", False),
        ("relay", "trainer", False),
        ("relay", "observer", False),
    ],
)
def test_a_guest_gets_no_role_that_its_issuer_lacks(by: str, role: str, fits: bool) -> None:
    if fits:
        assert further(role, by).token(ALICE, NOW).role == role
    else:
        with pytest.raises(Refused, match=f"gives the role {role}, its issuer has only {by}"):
            further(role, by)


def test_a_further_invitation_ends_no_later() -> None:
    token = further(days=300).token(ALICE, NOW)
    assert token.end == token.links[1].end == int(NOW) + 30 * DAY


def test_a_peer_an_invitation_and_what_hangs_on_it_are_revoked() -> None:
    token = further().token(ALICE, NOW)
    for id, why in zip(token.ids, ("invitation", "invitation", ALICE), strict=True):
        assert "revoked" in refusal(token, revoked={id})
        assert why in refusal(token, revoked={id})
    token.check(NOW, {"00" * 16})


def test_a_list_of_the_revoked_is_signed_and_numbered() -> None:
    first = Revocations().add(SEED, ["aa" * 16])
    second = first.add(SEED, ["bb" * 16])
    assert Revocations.decode(second.encode(), public_half(SEED)) == second
    assert (second.number, second.ids) == (2, ("aa" * 16, "bb" * 16))
    assert second > first > Revocations()
    for data in (second.encode()[:-1], bytes(72), b"", replace(second, number=3).encode()):
        with pytest.raises(Refused):
            Revocations.decode(data, public_half(SEED))
    with pytest.raises(Refused):
        Revocations.decode(second.encode(), public_half(FIRST))


def admission() -> Admission:
    return Admission(invited(guest=BOB).token(BOB, NOW), Revocations())


def test_who_has_presented_a_token_is_admitted_until_it_ends() -> None:
    gate = admission()
    with pytest.raises(Refused, match=UNPRESENTED):
        gate.check(ALICE, NOW)
    gate.admit(ALICE, invited(days=2, role="relay").token(ALICE, NOW).encode(), NOW)
    gate.check(ALICE, NOW + DAY)
    assert gate.role(ALICE) == "relay"
    assert [one.peer for one in gate.members(NOW)] == [ALICE]
    with pytest.raises(Refused, match="ended"):
        gate.check(ALICE, NOW + 3 * DAY)
    assert gate.expel(NOW + 3 * DAY) == [ALICE]


def test_the_revoked_are_expelled_and_stay_out() -> None:
    gate, token = admission(), invited().token(ALICE, NOW)
    gate.admit(ALICE, token.encode(), NOW)
    gate.revocations = Revocations().add(SEED, [token.ids[0]])
    assert gate.expel(NOW) == [ALICE]
    for peer in (ALICE, peer_of(public_half(THIRD))):
        with pytest.raises(Refused, match="revoked"):
            gate.admit(peer, invited().token(peer, NOW).encode(), NOW)


def test_another_peers_token_and_another_swarms_are_refused() -> None:
    gate = admission()
    with pytest.raises(Refused, match="another peer"):
        gate.admit(BOB, invited().token(ALICE, NOW).encode(), NOW)
    other = Invitation("other", public_half(THIRD), (), THIRD).invite(FIRST, offer())
    with pytest.raises(Refused, match="of another swarm"):
        gate.admit(ALICE, other.token(ALICE, NOW).encode(), NOW)


def test_a_forged_token_costs_one_signature(monkeypatch) -> None:
    checked: list[bytes] = []

    def is_signed(key: bytes, kind: str, data: bytes, signature: bytes) -> bool:
        checked.append(data)
        return False

    monkeypatch.setattr("equipoise.dht.admission._is_signed", is_signed)
    forged = Token(public_half(SEED), ALICE, further_links(), bytes(64))
    assert "not signed" in refusal(forged)
    assert len(checked) == 1


def further_links() -> tuple[Link, ...]:
    first = replace(offer(may_invite=True), signature=bytes(64))
    return first, replace(offer(SECOND), signature=bytes(64))


def test_tokens_from_one_address_are_bounded_and_members_come_back() -> None:
    gate, good = admission(), invited().token(ALICE, NOW).encode()
    gate.admit(ALICE, good, NOW, "192.0.2.1")
    for _ in range(int(PRESENTATIONS_BURST)):
        with pytest.raises(Refused):
            gate.admit(BOB, b"", NOW, "192.0.2.1")
    with pytest.raises(Refused, match="too many"):
        gate.admit(BOB, good, NOW, "192.0.2.1")
    gate.admit(ALICE, good, NOW, "192.0.2.1")
    with pytest.raises(Refused, match="malformed"):
        gate.admit(BOB, b"", NOW, "192.0.2.2")


@pytest.mark.parametrize("swarm", [Admission, admission], ids=["open", "private"])
def test_the_banned_are_refused_whatever_they_present(swarm) -> None:
    gate = swarm()
    if gate.token:
        gate.admit(ALICE, invited().token(ALICE, NOW).encode(), NOW)
    gate.check(ALICE, NOW)
    gate.banned = {ALICE: "noise"}
    with pytest.raises(Refused, match="has banned"):
        gate.check(ALICE, NOW)
    with pytest.raises(Refused, match="has banned"):
        gate.admit(ALICE, invited().token(ALICE, NOW).encode(), NOW)
    gate.banned = {}
    gate.check(ALICE, NOW)
