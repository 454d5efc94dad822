"""Votes that prove a mean: of whom, for what, and what liars can make of them."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.messages import Commit, Decision
from equipoise.averaging.allreduce.paxos import Vote
from equipoise.averaging.allreduce.vote_signatures import statement
from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.update import MAX_ROUNDS, Circle, MeanError, voters
from simulator.matchmaking import SPEC, signer, verify

BEFORE = StateId(7, "ab" * 32)
CONTRIBUTORS = 0b0111
DECISION = Decision(CONTRIBUTORS, 0b1111)
DIGEST = b"d" * 32


def round_of(peers: str, states: dict[str, StateId | None] | None = None, number: int = 7) -> Manifest:
    joins = []
    for peer in peers:
        nonce, state = peer.encode().ljust(16, b"."), (states or {}).get(peer, BEFORE)
        joins.append(Join(peer, SPEC, number, 1.0, 0.0, True, nonce, b"", state, b"").signed(signer(peer)))
    return Manifest.of(peers[0], joins)


ROUND = round_of("abcd")


def proof(
    peers: str,
    manifest: Manifest = ROUND,
    *,
    ballot: int = 0,
    digest: bytes = DIGEST,
    decision: Decision = DECISION,
    signed: bytes = b"",
) -> Commit:
    """As a donor that knows the votes of these members; `signed` is what they signed, if not their vote."""
    said = signed or statement(manifest.id, Vote(ballot, decision, digest))
    members = [(manifest.peers.index(peer), peer) for peer in peers]
    holders = sum(1 << member for member, _ in members)
    return Commit(ballot, decision, digest, holders, tuple((at, signer(peer)(said)) for at, peer in members))


prove = partial(voters, ROUND, CONTRIBUTORS, DIGEST, verify=verify)


def disproved(*proofs: Commit) -> str:
    with pytest.raises(MeanError) as refused:
        prove(proofs)
    return str(refused.value)


def test_more_than_half_of_the_members_prove_a_mean() -> None:
    assert prove([proof("abc")]) == {"a", "b", "c"}
    assert prove([proof("bcd")]) == {"b", "c", "d"}


def test_half_do_not() -> None:
    assert disproved(proof("ab")) == "expected votes of more than half of its round's 4 members, 2 signed"
    assert "0 signed" in disproved()


def test_of_two_members_both_are_needed() -> None:
    two = round_of("ab")
    both = proof("ab", two, decision=Decision(0b11, 0b11))
    assert voters(two, 0b11, DIGEST, [both], verify) == {"a", "b"}
    with pytest.raises(MeanError, match="1 signed"):
        voters(two, 0b11, DIGEST, [proof("b", two, decision=Decision(0b11, 0b11))], verify)


def test_a_forged_signature_counts_for_nothing() -> None:
    genuine = proof("ab").signatures
    assert "2 signed" in disproved(Commit(0, DECISION, DIGEST, 0b0111, (*genuine, (2, b"forged"))))
    another = (2, dict(genuine)[0])
    assert "2 signed" in disproved(Commit(0, DECISION, DIGEST, 0b0111, (*genuine, another)))


def test_one_member_votes_once_however_often_it_is_told() -> None:
    (vote,) = proof("a").signatures
    assert "1 signed" in disproved(Commit(0, DECISION, DIGEST, 0b1111, (vote,) * 64), proof("a"))


@pytest.mark.parametrize(
    "said",
    [
        proof("abc", digest=b"x" * 32),
        proof("abc", decision=Decision(0b1011, 0b1111)),
        proof("abc", signed=statement(b"another round...", Vote(0, DECISION, DIGEST))),
        proof("abc", signed=statement(ROUND.id, Vote(1, DECISION, DIGEST))),
        proof("abc", signed=statement(ROUND.id, Vote(0, Decision(CONTRIBUTORS, 1), DIGEST))),
        proof("abc", signed=statement(ROUND.id, Vote(0, DECISION, b"x" * 32))),
        proof("abc", signed=wire.encode(wire.Held(0, DECISION, DIGEST))),
    ],
    ids=["digest", "contributors", "signed round", "signed ballot", "owners", "signed digest", "domain"],
)
def test_votes_for_anything_else_prove_nothing(said: Commit) -> None:
    assert "0 signed" in disproved(said)


def test_what_one_donor_lacks_another_may_have() -> None:
    assert prove([proof("ab"), proof("bc")]) == {"a", "b", "c"}


def test_votes_of_two_ballots_do_not_add_up() -> None:
    assert "2 signed" in disproved(proof("ab"), proof("cd", ballot=4))
    assert prove([proof("abc"), proof("bcd", ballot=4)]) == {"a", "b", "c", "d"}


def test_liars_beside_an_honest_donor_change_nothing() -> None:
    members = tuple((member, b"forged") for member in range(64))
    assert prove([Commit(0, DECISION, DIGEST, 2**64 - 1, members), proof("abc")]) == {"a", "b", "c"}


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_no_byte_of_a_vote_can_be_changed(at: int, change: int) -> None:
    encoded = bytearray(wire.encode(proof("abc")))
    encoded[at % len(encoded)] ^= change
    try:
        changed = wire.decode(encoded)
    except FrameRefused:
        return
    if isinstance(changed, Commit):
        with contextlib.suppress(MeanError):
            assert prove([changed]) == {"a", "b", "c"}, "only what is not looked at may change"


# ---- whose round it was ----


NEXT = StateId(8, "ef" * 32)
CIRCLE = Circle().begun(round_of("abcd"), "d")


def claims(**states: int) -> Manifest:
    """A round whose members say that they hold the states of these epochs, each epoch's the same."""
    return round_of(
        "".join(states), {peer: StateId(epoch, f"{epoch:064x}") for peer, epoch in states.items()}
    )


def state(epoch: int) -> StateId:
    return StateId(epoch, f"{epoch:064x}")


def known_after(manifest: Manifest) -> frozenset[str]:
    return Circle().begun(manifest, "p").peers


def test_a_circle_are_the_others_who_held_the_state_in_a_round() -> None:
    manifest = round_of("abcdno", {"n": None, "o": StateId(0, "00" * 32)})
    assert Circle().begun(manifest, "d") == Circle(BEFORE, frozenset("abc"), (manifest.id,))


def test_it_is_of_the_state_that_this_peer_holds_whatever_most_say_that_they_hold() -> None:
    assert known_after(claims(a=0, b=0, c=0, d=0, p=0, x=1)) == frozenset("abcd")
    assert known_after(claims(a=5, p=5, b=6, c=6, x=7, y=7, z=7)) == frozenset(), "few are with it"
    assert known_after(claims(p=5, x=5, a=6, b=6)) == frozenset()
    assert known_after(claims(a=5, b=5, p=5, n=0, o=0, q=0, r=0)) == frozenset("ab"), "newcomers do not count"
    assert known_after(claims(n=0, p=0, a=5, b=5, c=5)) == frozenset()


def test_more_than_half_of_the_circle_must_have_voted() -> None:
    later = round_of("abmn", number=8)
    CIRCLE.check(later, BEFORE, frozenset("abm"))
    with pytest.raises(MeanError, match="half of the 3 peers from which this peer has its state, 1 of them"):
        CIRCLE.check(later, BEFORE, frozenset("amn"))


def test_it_tells_nothing_of_any_other_state() -> None:
    later = round_of("abmn", dict.fromkeys("abmn", NEXT))
    with pytest.raises(MeanError, match="half of the 0 peers"):
        CIRCLE.check(later, NEXT, frozenset("abmn"))
    with pytest.raises(MeanError, match="half of the 0 peers"):
        CIRCLE.check(ROUND, NEXT, frozenset("abmn"))


def test_strangers_prove_nothing_to_who_knows_none_of_them() -> None:
    strangers = round_of("xyz")
    everybody = proof("xyz", strangers)
    voted = voters(strangers, CONTRIBUTORS, DIGEST, [everybody], verify)
    assert voted == {"x", "y", "z"}
    for circle in (CIRCLE, Circle()):
        with pytest.raises(MeanError, match="0 of them voted"):
            circle.check(strangers, BEFORE, voted)


def test_joins_of_the_circle_that_strangers_outnumber_prove_nothing() -> None:
    mixed = round_of("abcvwxyz")
    voted = voters(mixed, CONTRIBUTORS, DIGEST, [proof("vwxyz", mixed)], verify)
    with pytest.raises(MeanError, match="0 of them voted"):
        CIRCLE.check(mixed, BEFORE, voted)


def test_a_round_that_this_peer_began_is_its_own_group_s_whoever_voted() -> None:
    CIRCLE.check(ROUND, BEFORE, frozenset("xyz"))


def test_late_joiners_take_nothing_from_it() -> None:
    later = round_of("abc" + "klmnopqrst", dict.fromkeys("klmnopqrst"))
    CIRCLE.check(later, BEFORE, frozenset("ab" + "klmnop"))


def test_a_round_that_fails_adds_its_id_and_takes_nobody_away_nor_brings_anybody() -> None:
    small = round_of("dxy", number=8)
    after = CIRCLE.begun(small, "d")
    assert after == Circle(BEFORE, frozenset("abc"), (ROUND.id, small.id))
    assert after.begun(round_of("dxy", {"d": None}), "d") == after, "it says that it holds nothing"
    for number in range(9, 99):
        after = after.begun(round_of("dx", number=number), "d")
    assert len(after.rounds) == MAX_ROUNDS


def test_it_leads_on_through_a_round_that_succeeds() -> None:
    wider = round_of("abcdefg")
    after = CIRCLE.begun(wider, "d").ended(BEFORE, wider, "d")
    assert after.peers == frozenset("abcefg")
    assert after.knows(NEXT)
    assert after.knows(BEFORE), "perhaps the trainer has not applied it"
    assert not after.knows(StateId(9, NEXT.lineage))
    straggler = round_of("dg", {"d": NEXT, "g": NEXT})
    assert after.begun(straggler, "d") == Circle(
        NEXT, frozenset("abcefg"), (ROUND.id, wider.id, straggler.id)
    )
    assert CIRCLE.ended(BEFORE, wider, "d") == CIRCLE, "it was not in that one"


def test_it_leads_on_through_means_that_were_missed_and_nobody_joins_it_on_the_way() -> None:
    after = CIRCLE.followed(BEFORE)
    assert after.knows(NEXT)
    again = after.followed(NEXT)
    assert again.peers == CIRCLE.peers
    assert again.knows(state(9))
    assert not again.knows(BEFORE)
