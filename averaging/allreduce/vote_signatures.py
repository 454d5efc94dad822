"""Votes that others can check, so that no member, not even the leader, can claim a majority that does not exist.

Members that cannot be dialled do not hear each other: they learn from another member which members voted. So each vote
carries its voter's signature over the round, the ballot, the decision and the digest. An unsigned vote does not count,
even from the voter itself: no other member could be convinced by it, and the members would disagree on the chosen mean.
No signature is checked twice: a round costs each member one signature, and a check of 0.07 ms for each other member.

A member can still vote for a mean that it does not hold, or for two means. Paxos promises no more here than this: with
one liar, a majority still takes a majority less one of honest votes. To tolerate more liars would take two thirds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.messages import Vote
from equipoise.averaging.allreduce.paxos import members_of
from equipoise.averaging.manifest import Identity

DOMAIN = b"equipoise vote 1\0"
"""Prefix of signed votes: no other bytes that an identity signs begin with it."""

MAX_VOTES_PER_MEMBER = 64
"""Most different votes that one member may report: members cast one per ballot, and few rounds have a third ballot."""

MAX_BAD_SIGNATURES = 128
"""Most false signatures of one sender in a round, 0.1 ms each. An honest sender may pass on one per liar and vote."""


class VoteSignatures:
    """Signs one member's own votes in a round, and checks the votes that other members report.

    Args:
        me: This member's index.
        peers: PeerIDs by member.
    """

    def __init__(self, round_id: bytes, me: int, peers: Sequence[str], identity: Identity) -> None:
        self._round_id = round_id
        self._me = me
        self._peers = tuple(peers)
        self._identity = identity
        self._signatures: dict[Vote, dict[int, bytes]] = {}
        self._told: Counter[int] = Counter()
        self._bad: Counter[int] = Counter()

    def seal(self, message: wire.RoundMessage) -> wire.RoundMessage:
        """Return an outgoing message with the signatures that it needs."""
        match message:
            case wire.Votes(vote, voters):
                if voters >> self._me & 1 and self._me not in self._signatures.setdefault(vote, {}):
                    self._signatures[vote][self._me] = self._identity.sign(statement(self._round_id, vote))
                known = self._signatures.get(vote, {})
                proofs = tuple((one, known[one]) for one in members_of(voters) if one in known)
                return msgspec.structs.replace(message, signatures=proofs)
        return message

    def check(self, sender: int, message: wire.RoundMessage) -> wire.RoundMessage:
        """Return a received message without the voters that it does not prove."""
        match message:
            case wire.Votes(vote, voters):
                proofs = dict(message.signatures)
                proved = sum(
                    1 << voter
                    for voter in members_of(voters & ((1 << len(self._peers)) - 1))
                    if self._proved(sender, voter, vote, proofs.get(voter))
                )
                return msgspec.structs.replace(message, voters=proved)
        return message

    def _proved(self, teller: int, voter: int, vote: Vote, signature: bytes | None) -> bool:
        known = self._signatures.get(vote)
        if known is not None and voter in known:
            return True
        too_many = known is None and self._told[teller] >= MAX_VOTES_PER_MEMBER
        if signature is None or too_many or self._bad[teller] >= MAX_BAD_SIGNATURES:
            return False
        if not self._identity.verify(self._peers[voter], statement(self._round_id, vote), signature):
            self._bad[teller] += 1
            return False
        if known is None:
            self._told[teller] += 1
            known = self._signatures[vote] = {}
        known[voter] = signature
        return True


def statement(round_id: bytes, vote: Vote) -> bytes:
    """Return the bytes that a member of a round signs to cast a vote."""
    return DOMAIN + round_id + msgspec.msgpack.encode(vote)
