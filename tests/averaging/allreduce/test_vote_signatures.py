"""Votes with signatures: who is believed about whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.messages import Decision, Vote, Votes
from equipoise.averaging.allreduce.vote_signatures import (
    MAX_BAD_SIGNATURES,
    MAX_VOTES_PER_MEMBER,
    VoteSignatures,
)
from fakes.memory import FakeIdentity

A, B, C, D = range(4)
PEERS = ("a", "b", "c", "d")
DECISION = Decision(0b1111, 0b1111)
DIGEST = b"d" * 32
VOTE = Vote(0, DECISION, DIGEST)
checks: list[str] = []


class Counting(FakeIdentity):
    """Counts the checks of signatures."""

    def role(self, peer: str) -> str:
        return "trainer"

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        checks.append(peer)
        return super().verify(peer, data, signature)


def vote_signatures(me: int, round_id: bytes = bytes(16)) -> VoteSignatures:
    checks.clear()
    return VoteSignatures(round_id, me, PEERS, Counting(PEERS[me]))


def own(voter: int, vote: Vote = VOTE) -> Votes:
    """As a member that casts its own vote."""
    sealed = vote_signatures(voter).seal(Votes(vote, 1 << voter))
    assert isinstance(sealed, Votes)
    return sealed


def signature_of(voter: int) -> bytes:
    return dict(own(voter).signatures)[voter]


def commit(voters: Sequence[int], claimed: int = -1) -> Votes:
    """As one that has heard the votes of `voters` claims more."""
    teller = vote_signatures(voters[0])
    teller.seal(Votes(VOTE, 1 << voters[0]))
    for voter in voters[1:]:
        teller.check(voter, own(voter))
    told = sum(1 << voter for voter in voters) if claimed < 0 else claimed
    sealed = teller.seal(Votes(VOTE, told))
    assert isinstance(sealed, Votes)
    return sealed


def believed(listener: VoteSignatures, sender: int, message: Votes) -> int:
    checked = listener.check(sender, message)
    assert isinstance(checked, Votes)
    return checked.voters


def test_a_commit_proves_the_votes_that_it_carries() -> None:
    message = commit([A, B, C])
    assert wire.decode(wire.encode(message)) == message
    assert believed(vote_signatures(D), A, message) == 0b0111
    assert checks == ["a", "b", "c"]


def test_a_vote_that_was_heard_is_checked_once() -> None:
    votes = [own(voter) for voter in (A, B, C)]
    listener = vote_signatures(D)
    for voter, vote in enumerate(votes):
        assert listener.check(voter, vote) == vote
        assert listener.check(voter, vote) == vote
    assert believed(listener, A, Votes(VOTE, 0b0111)) == 0b0111
    assert checks == ["a", "b", "c"]


@pytest.mark.parametrize("signature", [b"", b"forged", signature_of(B)], ids=["none", "forged", "another's"])
def test_a_vote_that_convinces_nobody_else_does_not_count_here_either(signature: bytes) -> None:
    listener = vote_signatures(D)
    assert believed(listener, A, Votes(VOTE, 1 << A, ((A, signature),))) == 0
    assert believed(listener, A, own(A)) == 1 << A, "it may yet say so truly"


def test_votes_learnt_from_a_commit_can_be_proved_to_others() -> None:
    second = vote_signatures(C)
    second.check(A, commit([A, B]))
    told = second.seal(Votes(VOTE, 0b0111))
    assert isinstance(told, Votes)
    assert believed(vote_signatures(D), C, told) == 0b0111


def test_a_member_without_proofs_speaks_for_itself() -> None:
    assert believed(vote_signatures(D), A, commit([A], claimed=0b1111)) == 0b0001


@pytest.mark.parametrize(
    ("ballot", "digest"), [(1, DIGEST), (0, b"x" * 32)], ids=["of another ballot", "of another mean"]
)
def test_a_signature_is_of_one_vote(ballot: int, digest: bytes) -> None:
    genuine = commit([A, B, C])
    forged = Votes(Vote(ballot, DECISION, digest), 0b0111, genuine.signatures)
    assert believed(vote_signatures(D), A, forged) == 0


def test_a_signature_is_of_one_round() -> None:
    assert believed(vote_signatures(D, round_id=b"another round..."), A, commit([A, B, C])) == 0


def test_a_signature_is_of_one_voter_and_domain() -> None:
    genuine = dict(commit([A, B]).signatures)
    forged = Votes(VOTE, 0b0110, ((C, genuine[B]), (B, DIGEST)))
    assert believed(vote_signatures(D), A, forged) == 0


def test_strangers_hold_nothing() -> None:
    proofs = tuple((member, b"x") for member in range(64))
    assert believed(vote_signatures(D), A, Votes(VOTE, 0b0001)) == 0, "not even its own, unsigned"
    assert believed(vote_signatures(D), A, Votes(VOTE, 2**64 - 1, proofs)) == 0


def test_checks_and_memory_for_one_member_are_bounded() -> None:
    listener = vote_signatures(D)
    for ballot in range(10 * MAX_BAD_SIGNATURES):
        vote = Vote(ballot, DECISION, DIGEST)
        assert believed(listener, A, Votes(vote, 1 << B, ((B, b"forged"),))) == 0
        assert believed(listener, A, Votes(vote, 1 << A, ((A, b"x"),))) == 0
    assert len(checks) == MAX_BAD_SIGNATURES
    assert len(listener._signatures) <= MAX_VOTES_PER_MEMBER
    assert believed(listener, B, commit([B, C])) == 0b0110


def test_a_member_with_too_many_votes_is_no_longer_heard_and_silences_no_other() -> None:
    listener = vote_signatures(D)

    def heard(voter: int, ballot: int) -> bool:
        return believed(listener, voter, own(voter, Vote(ballot, DECISION, DIGEST))) == 1 << voter

    told = [heard(C, ballot) for ballot in range(2 * MAX_VOTES_PER_MEMBER)]
    assert told == [True] * MAX_VOTES_PER_MEMBER + [False] * MAX_VOTES_PER_MEMBER
    assert heard(B, 10**6)
    assert not heard(C, 10**6 + 1)
    assert heard(C, 10**6)


def test_a_vote_is_signed_once_and_anything_else_passes_as_it_is() -> None:
    signer = vote_signatures(A)
    assert signer.seal(Votes(VOTE, 1 << A)) == signer.seal(Votes(VOTE, 1 << A))
    assert set(signer._signatures) == {VOTE}
    for message in (wire.Prepare(3), wire.Fetch(0b11, b"")):
        assert signer.seal(message) is message
        assert signer.check(B, message) is message
