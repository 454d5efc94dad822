"""The chain of means: for each mean the claims and the signed votes of its round, which lead from state to state.

Identities and epochs are free, so neither the number of peers with a state nor its epoch says anything for it. A peer
leaves its state only along links: the mean after it, with the votes of more than half of the peers that held it. The
peers that claimed a state in the round of its mean hold the state after that mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.paxos import members_of
from equipoise.averaging.allreduce.vote_signatures import statement
from equipoise.averaging.manifest import Claim, Manifest, Verify, round_id
from equipoise.averaging.options import MAX_GROUP_SIZE
from equipoise.averaging.replication import lineage
from equipoise.averaging.state import StateId, Step

PAGE_BYTES, MAX_PAGE = 64 * 1024, 512
"""Most bytes, and number, of the links of one answer: some hundred of small groups, one or two of the largest."""

LOG_BYTES, MAX_FRESH = 8 * 1024 * 1024, 16
"""Most bytes of all links that are kept, ten thousand of small groups, and most links that are not encoded yet: votes
come in for a while after a round."""

Claims = Annotated[tuple[Claim, ...], msgspec.Meta(min_length=2, max_length=MAX_GROUP_SIZE)]


class Link(msgspec.Struct, frozen=True, array_like=True):
    """One mean of the chain, without its values.

    Attributes:
        claims: The claims of the round's members, in member order.
        digest: The manifest's digest: with the claims it makes the round's id.
        vote: The vote for the mean.
        signatures: The voters, as indices into the claims, with their signatures.
    """

    claims: Claims
    digest: wire.Digest
    vote: wire.Vote
    signatures: wire.Signatures


class Votes(NamedTuple):
    """The votes for a round's mean; signatures are added while they come in."""

    manifest: Manifest
    vote: wire.Vote
    signatures: dict[int, bytes]

    def link(self) -> Link:
        """The link with the signatures of now."""
        return Link(self.manifest.claims, self.manifest.digest, self.vote, tuple(self.signatures.items()))


class Chain(NamedTuple):
    """Checks links from a state on.

    Attributes:
        state: Where the chain begins.
        holders: The peers that held it; empty if this peer knows none: then those that claim it in the link count.
        verify: Checks signatures.
        own: Whether this peer began the round of an id. If most that claimed a state there claimed this one, and this
            peer too, these decide, as they did in the round.
        me: This peer's PeerID.
        least: The number of holders that must have voted; 0: more than half.
    """

    state: StateId
    holders: frozenset[str]
    verify: Verify
    own: Callable[[bytes], bool] = lambda id: False
    me: str = ""
    least: int = 0

    def follow(self, links: Iterable[Link]) -> tuple[Step, ...]:
        """Return the states to which these links lead, as far as they are proved."""
        steps: list[Step] = []
        at = self
        for link in links:
            step = at._step(link)
            if step is None:
                break
            steps.append(step)
            at = at._replace(state=step.state, holders=frozenset(step.holders), least=0)
        return tuple(steps)

    def _step(self, link: Link) -> Step | None:
        claims, contributors = link.claims, link.vote.decision.contributors
        if contributors >> len(claims) or not any(claims[at].gives for at in members_of(contributors)):
            return None
        id = round_id(claims, link.digest)
        signed = statement(id, link.vote)
        votes = {claims[at].peer: one for at, one in link.signatures if at < len(claims)}
        states = dict.fromkeys(one.state for one in claims if one.state is not None)
        for before in (one for one in states if lineage.continues(self.state, one)):
            held = tuple(one.peer for one in claims if one.state == before)
            among = frozenset(held)
            alike = 2 * len(held) > sum(one.state is not None for one in claims)
            if alike and (not self.holders or (self.me in among and self.own(id))):
                enough = len(among) // 2 + 1
            else:
                # A holder that has written to its state claims none, and votes for what it takes on.
                among = self.holders & {one.peer for one in claims if one.state in (before, None)}
                enough = self.least or len(self.holders) // 2 + 1
            voters = sorted(among & votes.keys())
            genuine = (peer for peer in voters if self.verify(peer, signed, votes[peer]))
            # No more signatures are checked than it takes.
            if len(voters) >= enough and len(tuple(islice(genuine, enough))) == enough:
                return Step(lineage.after(before, link.vote.digest.hex()), held)
        return None


class Log:
    """The links of the last means, by the epoch before each."""

    def __init__(self) -> None:
        self._fresh: dict[int, Callable[[], Link]] = {}
        self._links: dict[int, bytes] = {}
        self._size = 0

    def add(self, epoch: int, link: Callable[[], Link]) -> None:
        """Keep a link, in place of an earlier one after the same epoch, and drop the oldest beyond the bound."""
        self._fresh.pop(epoch, None)
        self._fresh[epoch] = link
        if len(self._fresh) > MAX_FRESH:
            oldest = next(iter(self._fresh))
            encoded = msgspec.msgpack.encode(self._fresh.pop(oldest)())
            self._size += len(encoded) - len(self._links.pop(oldest, b""))
            self._links[oldest] = encoded
        while self._size > LOG_BYTES:
            self._size -= len(self._links.pop(next(iter(self._links))))

    def page(self, epoch: int) -> tuple[Link, ...]:
        """Return the links from a state of this epoch on, as many as one answer takes."""
        page: list[Link] = []
        size = 0
        for at in range(epoch, epoch + MAX_PAGE):
            made = self._fresh.get(at)
            encoded = self._links.get(at, b"") if made is None else msgspec.msgpack.encode(made())
            size += len(encoded)
            if not encoded or (page and size > PAGE_BYTES):
                break
            page.append(_link.decode(encoded))
        return tuple(page)


_link = msgspec.msgpack.Decoder(Link)
