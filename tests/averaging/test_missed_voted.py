"""Whose mean it is that was missed: proved by votes, whoever gives it, and what liars and strangers come to."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch

from equipoise.averaging.aio import update_verification
from equipoise.averaging.aio.transfer import Transfer
from equipoise.averaging.allreduce.messages import Commit, Held, RoundMessage
from equipoise.averaging.allreduce.vote_signatures import VoteSignatures
from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.answers import ANSWER_SECONDS
from equipoise.averaging.statesync.chunks import CHUNK_BYTES
from equipoise.averaging.statesync.client import Fetch, Request
from equipoise.averaging.statesync.events import (
    Allocate,
    AnswerReceived,
    AskReceived,
    Check,
    Checked,
    FetchEvent,
    Finish,
    MemoryReady,
    MemoryRefused,
    PeerLost,
    PeersSeen,
    Send,
    Withdrew,
    Woke,
)
from equipoise.averaging.statesync.messages import Answer, Ask, AskChunks, AskDigests, Offer
from equipoise.averaging.statesync.update import Circle, EncodedMean, MeanError, Prove, read_head, voters
from equipoise.averaging.timing import STALL_SECONDS
from fakes.cluster import SPEC, Cluster
from fakes.memory import FakeIdentity
from fakes.missed import kept_by, mean_of, recovered, round_of, rounds
from fakes.transfer import RUN, TICKET, chunk_came, digests_came, offer_of, proof_of
from fakes.transfer import SPEC as HASH

BEFORE = StateId(7, "ab" * 32)
NEXT = StateId(8, "ef" * 32)
LAST = StateId(9, "0f" * 32)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.stop()


def keeps(mean: EncodedMean, proof: Commit, *transfers: Transfer) -> None:
    for transfer in transfers:
        transfer.keep(mean, lambda: proof)


def mean_kept(names: str, state: StateId) -> tuple[EncodedMean, Prove]:
    mean, proof = mean_of(names, state)
    return mean, lambda: proof


def was_in(transfer: Transfer, names: str, state: StateId) -> None:
    """One round of these peers from that state to the next."""
    transfer.begin(round_of(names, state))
    transfer.keep(*mean_kept(names, state))


async def test_the_votes_of_its_own_group_tell_whose_mean_it_is_however_many_come_later(
    cluster: Cluster,
) -> None:
    a, b, away = await cluster.add("a", "b", "c")
    was_in(away, "abc", BEFORE)
    mean, proof = mean_of("abuvw", NEXT)
    keeps(mean, proof, a, b)
    await cluster.add(*"klmnopqr")
    found, result, sources = await recovered(away, NEXT, proved=False)
    assert found.ok, found.reason
    assert found.digest == mean.digest().hex()
    assert bool((result == 5.0).all())
    assert set(sources) <= {"a", "b"}


async def test_one_honest_donor_is_enough(cluster: Cluster) -> None:
    a, *_, away = await cluster.add("a", "b", "c", "d")
    was_in(away, "abcd", BEFORE)
    mean, proof = mean_of("abc", NEXT, votes="bc")
    keeps(mean, proof, a)
    found, _, sources = await recovered(away, NEXT, proved=False)
    assert found.digest == mean.digest().hex(), found.reason
    assert set(sources) == {"a"}


async def test_who_knows_nobody_believes_only_what_the_next_state_will_prove(cluster: Cluster) -> None:
    a, b, late = await cluster.add("a", "b", "c")
    keeps(*mean_of("ab", BEFORE), a, b)
    found, _, _ = await recovered(late, BEFORE, proved=False)
    assert not found.ok
    assert "half of the 0 peers from which this peer has its state" in found.reason
    found, _, _ = await recovered(late, BEFORE, proved=True)
    assert found.ok, found.reason


async def test_those_who_were_polled_for_a_snapshot_tell_what_came_next(cluster: Cluster) -> None:
    *donors, late = await cluster.add("a", "b", "c", "p")
    for donor in donors:
        await donor.offer(BEFORE, memoryview(b"a state"))
    fetched = await late.fetch(BEFORE.epoch, 100, 20.0, update_verification.room)
    assert fetched.ok, fetched.reason
    # Two of the three are enough for a snapshot, and the late one knows its state by those.
    keeps(*mean_of("abcmn", BEFORE), *donors)
    keeps(*mean_of("abcmn", NEXT, votes="abcm"), *donors)
    for state in (BEFORE, NEXT):
        found, _, _ = await recovered(late, state, proved=False)
        assert found.ok, found.reason
    keeps(*mean_of("cmnop", LAST), *donors)
    found, _, _ = await recovered(late, LAST, proved=False)
    assert re.search(r"half of the [23] peers from which this peer has its state, [01] of", found.reason)


@pytest.mark.parametrize("held", [None, StateId(3, "03" * 32)])
async def test_those_who_held_the_state_of_a_round_attended_from_elsewhere_tell_what_came_next(
    cluster: Cluster, held: StateId | None
) -> None:
    a, b, late = await cluster.add("a", "b", "c")
    was_in(late, "abc", StateId(2, "02" * 32))
    mean, proof = mean_of("abc", BEFORE, states={"c": held})
    late.begin(mean.manifest)
    late.keep(mean, lambda: proof)
    keeps(*mean_of("ab", NEXT), a, b)
    found, _, _ = await recovered(late, NEXT, proved=False)
    assert found.ok, found.reason
    keeps(*mean_of("xyz", LAST), a, b)
    found, _, _ = await recovered(late, LAST, proved=False)
    assert "half of the 2 peers from which this peer has its state, 0 of them voted" in found.reason


async def test_a_peer_that_catches_up_waits_for_no_second_between_two_means(cluster: Cluster) -> None:
    a, b, late = await cluster.add("a", "b", "c")
    was_in(late, "abc", BEFORE)
    for state in (NEXT, LAST):
        keeps(*mean_of("abc", state), a, b)
    began = asyncio.get_running_loop().time()
    for state in (NEXT, LAST):
        assert (await recovered(late, state, proved=False))[0].ok
    assert a._asks.admits("c", began), "neither question was dropped"


async def test_who_copies_the_offer_of_a_snapshot_outvotes_nobody_who_had_a_say_in_it(
    cluster: Cluster,
) -> None:
    *others, me = await cluster.add(*"abcdewxyz", "p")
    for one in others:
        one.reach(BEFORE.epoch)
    for one in (*others[:3], *others[5:]):
        await one.offer(BEFORE, memoryview(b"a state"))
    fetched = await me.fetch(BEFORE.epoch, 100, 20.0, update_verification.room)
    assert fetched.ok, fetched.reason
    keeps(*mean_of("wxyz", BEFORE), *others[5:])
    found, _, _ = await recovered(me, BEFORE, proved=False)
    assert "half of the 9 peers from which this peer has its state, 4 of them voted" in found.reason


async def test_a_liar_that_says_it_is_further_is_not_the_one_by_whom_the_state_is_known(
    cluster: Cluster,
) -> None:
    first, further = StateId(0, "00" * 32), StateId(1, "66" * 32)
    me, liar = await cluster.add("p", "x")
    me.begin(round_of("abcdpx", first, states={"x": further}))
    keeps(*mean_of("xy", first), liar)
    found, _, _ = await recovered(me, first, proved=False)
    assert "half of the 4 peers from which this peer has its state, 0 of them voted" in found.reason


async def test_a_round_that_failed_with_a_straggler_takes_nothing_away(cluster: Cluster) -> None:
    *others, me = await cluster.add(*"abcdefg", "p")
    was_in(me, "abcdefgpq", BEFORE)
    me.begin(round_of("pq", NEXT))
    keeps(*mean_of("abcdefg", NEXT), *others)
    found, _, _ = await recovered(me, NEXT, proved=False)
    assert found.ok, found.reason


async def test_newcomers_who_say_no_state_in_a_round_tell_nothing_of_it(cluster: Cluster) -> None:
    a, away = await cluster.add("a", "b")
    was_in(away, "ab", BEFORE)
    away.begin(round_of("bxyz", None))
    keeps(*mean_of("xyz", NEXT), a)
    found, _, _ = await recovered(away, NEXT, proved=False)
    assert "half of the 1 peer from which this peer has its state, 0 of them voted" in found.reason


async def test_a_mean_of_strangers_is_refused_and_the_group_s_is_taken_from_the_next(
    cluster: Cluster,
) -> None:
    a, away, *liars = await cluster.add("a", "c", "x", "y")
    was_in(away, "abc", BEFORE)
    mean, proof = mean_of("ab", NEXT)
    keeps(mean, proof, a)
    keeps(*mean_of("vwxyz", NEXT), *liars)
    found, _, sources = await recovered(away, NEXT, proved=False)
    assert found.digest == mean.digest().hex(), found.reason
    assert "a" in sources


@pytest.mark.parametrize("names", ["xyz", "abcvwxyz"])
async def test_where_only_strangers_voted_for_one_there_is_none(cluster: Cluster, names: str) -> None:
    away, _, liar = await cluster.add("c", "a", "x")
    was_in(away, "abc", BEFORE)
    keeps(*mean_of(names, NEXT, votes=names.removeprefix("abc")), liar)
    found, _, _ = await recovered(away, NEXT, proved=False)
    assert not found.ok
    assert "none of 1 peer that answered keeps the mean after epoch 8" in found.reason
    assert "x: expected votes of more than half of the 2 peers from which this peer has" in found.reason


async def test_a_refusal_for_lack_of_votes_is_not_the_last_word_and_later_votes_are_passed_on(
    cluster: Cluster,
) -> None:
    a, me = await cluster.add("a", "p")
    me.begin(round_of("abcp", NEXT))
    (mean, early), (_, late) = mean_of("abckmno", NEXT, votes="akmn"), mean_of("abckmno", NEXT)
    votes = [early]
    a.keep(mean, lambda: votes[0])
    got = await me.recover(NEXT, 20.0, lambda: torch.empty(me.values))
    assert "half of the 3 peers from which this peer has its state, 1 of them voted" in got.round.reason
    assert got.unheard == 1
    votes[0] = late
    found, _, _ = await recovered(me, NEXT, proved=False)
    assert found.ok, found.reason


async def test_a_liar_that_forges_its_vote_neither_ends_the_round_nor_has_the_mean_dropped(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    *others, late = await cluster.add(*"abcdx", "p")
    seal = VoteSignatures.seal

    def forge(self: VoteSignatures, message: RoundMessage) -> RoundMessage:
        forged = isinstance(message, Held) and self._peers[self._me] == "x"
        return msgspec.structs.replace(message, signature=b"forged") if forged else seal(self, message)

    monkeypatch.setattr(VoteSignatures, "seal", forge)
    ends = await rounds(cluster, "abcdx", BEFORE)
    assert all(outcome.ok for outcome, _ in ends), ends
    verify = FakeIdentity("p").verify
    for other in others[:4]:
        mean, proof = kept_by(other, BEFORE)
        assert len(voters(mean.manifest, mean.contributors, mean.digest(), [proof], verify)) >= 3
    found, _, _ = await recovered(late, BEFORE, proved=True)
    assert found.ok, found.reason


async def test_a_mean_that_takes_the_place_of_another_is_not_dropped_with_it(cluster: Cluster) -> None:
    a, me = await cluster.add("a", "p")
    me.begin(round_of("abp", NEXT))
    a.keep(*mean_kept("abx", NEXT))
    a._driver.tell(AskReceived("p", Ask(SPEC.name, TICKET, SPEC.hash, 0, (), NEXT)))
    await asyncio.sleep(0)
    mean, proof = mean_of("ab", NEXT)
    keeps(mean, proof, a)
    found, _, _ = await recovered(me, NEXT, proved=False)
    assert found.digest == mean.digest().hex(), found.reason


async def test_what_is_wrong_with_an_image_that_nobody_thought_of_is_its_donor_s_fault(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, *liars, me = await cluster.add("a", "x", "y", "p")
    me.begin(round_of("apxy", NEXT))
    mean, proof = mean_of("apxy", NEXT)
    keeps(mean, proof, a)
    keeps(*mean_of("abx", NEXT), *liars)
    decode = update_verification.decode

    def fails(image: memoryview, *args: Any) -> Outcome:
        if len(read_head(image)[0].members) == 3:
            raise ValueError("what is this?")
        return decode(image, *args)

    monkeypatch.setattr(update_verification, "decode", fails)
    got = await me.recover(NEXT, 20.0, lambda: torch.empty(me.values))
    assert got.round.digest == mean.digest().hex(), got.round.reason
    assert set(got.sources) == {"a"}


async def test_where_there_is_no_room_there_is_none_for_any(cluster: Cluster) -> None:
    a, me = await cluster.add("a", "p")
    me.begin(round_of("abp", NEXT))
    keeps(*mean_of("ab", NEXT), a)

    def none() -> torch.Tensor:
        raise ValueError("no memory for it")

    got = await me.recover(NEXT, 20.0, none)
    assert got.round.reason.startswith("no memory for it")


def test_who_receives_one_checks_its_votes_whatever_the_donor_did() -> None:
    mean, proof = mean_of("ab", BEFORE, votes="a")
    wanted = SPEC, BEFORE, Circle().begun(mean.manifest, "b")
    image, room = memoryview(mean.image()), lambda: torch.empty(SPEC.layout.size)
    with pytest.raises(MeanError, match="more than half of its round's 2 members, 1 signed"):
        update_verification.decode(image, *wanted, [proof], FakeIdentity("b").verify, room)
    _, both = mean_of("ab", BEFORE)
    assert update_verification.decode(image, *wanted, [proof, both], FakeIdentity("b").verify, room).ok


# ---- what is tried, one after another ----


PROOF, ANOTHER, LYING = proof_of(0, 1), proof_of(0, 1, ballot=4), proof_of(0, 1, ballot=2)
GENUINE, FORGED = offer_of(7), offer_of(7, kind=1)


class Fetching:
    """The machine of one that missed a mean, of which all chunks come as soon as they are asked for."""

    def __init__(self, *peers: str, circle: str = "") -> None:
        request = Request(
            RUN, HASH, TICKET, 0, 10 * CHUNK_BYTES, after=GENUINE.state, circle=frozenset(circle)
        )
        self.machine = Fetch(request, 0.0, timeout=60.0)
        self.done: list[object] = []
        self.asked: list[tuple[str, int]] = []
        self.tell(PeersSeen(peers))

    def tell(self, event: FetchEvent, now: float = 0.0) -> None:
        for action in self.machine.handle(event, now):
            match action:
                case Send(to, AskDigests()):
                    self.asked.append((to, -1))
                case Send(to, AskChunks(chunks=chunks)):
                    self.asked += [(to, chunk) for chunk in chunks]
                case Send():
                    pass
                case _:
                    self.done.append(action)

    def hear(self, peer: str, *offers: Offer, proof: Commit | None = None, now: float = 0.0) -> None:
        self.tell(AnswerReceived(peer, Answer(RUN, TICKET, 8, (), offers, proof)), now)

    def wait(self, since: float) -> float:
        """Until something is to be done, while nothing comes that is asked for; returns when that is."""
        now = since
        while not self.done:
            self.asked.clear()
            now = max(self.machine.deadline, now + 1e-3)
            self.tell(Woke(), now)
        return now

    def download(self, offer: Offer, now: float = 0.0) -> None:
        assert self.take() == [Allocate(offer.image)]
        self.tell(MemoryReady(offer.image.size), now)
        while self.asked:
            peer, chunk = self.asked.pop(0)
            self.tell(digests_came(peer, offer) if chunk < 0 else chunk_came(peer, offer, chunk), now)

    def take(self) -> list[object]:
        done, self.done = self.done, []
        return done


def test_what_is_here_is_checked_with_all_proofs_that_were_given_for_it() -> None:
    fetching = Fetching("a", "b", "c")
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.hear("b", GENUINE, proof=ANOTHER)
    fetching.hear("c", FORGED, proof=PROOF)
    fetching.download(GENUINE)
    assert fetching.take() == [Check((PROOF, ANOTHER))]
    fetching.tell(Checked(""))
    (end,) = fetching.take()
    assert isinstance(end, Finish)
    assert end.outcome.ok


def test_what_is_not_proved_bars_all_who_offer_it_and_the_next_is_tried() -> None:
    fetching = Fetching("x", "y", "a")
    fetching.hear("x", FORGED, proof=PROOF)
    fetching.hear("y", FORGED, proof=LYING)
    fetching.download(FORGED)
    assert fetching.take() == [Check((PROOF, LYING))]
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.tell(Checked("0 signed"))
    fetching.download(GENUINE)
    assert fetching.take() == [Check((PROOF,))]
    fetching.tell(Checked(""))
    (end,) = fetching.take()
    assert isinstance(end, Finish)
    assert end.outcome.ok
    assert end.outcome.sources == {"a": GENUINE.image.size}
    assert "x: 0 signed; y: 0 signed" in end.outcome.reason


def test_one_that_offers_the_genuine_mean_with_false_votes_does_not_keep_others_from_proving_it() -> None:
    fetching = Fetching("x", "a")
    fetching.tell(PeerLost("a", "it is slow"))
    fetching.hear("x", GENUINE, proof=LYING)
    fetching.download(GENUINE)
    assert fetching.take() == [Check((LYING,))]
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.tell(Checked("0 signed"))
    assert fetching.take() == [Check((LYING, PROOF))], "at once, for all of it is here"


def test_where_nobody_is_left_the_reason_says_what_was_wrong_with_each() -> None:
    fetching = Fetching("x", "b")
    fetching.hear("b")
    fetching.hear("x", FORGED, proof=LYING)
    fetching.download(FORGED)
    fetching.take()
    fetching.tell(Checked("0 signed"))
    none = "none of 1 peer that answered keeps the mean after epoch 7; x: 0 signed"
    assert fetching.take() == [Finish(FetchOutcome(ok=False, reason=none, unheard=1))]


def test_one_that_offers_more_than_a_mean_can_have_does_not_keep_others_from_giving_it() -> None:
    fetching = Fetching("x", "a")
    fetching.hear("x", offer_of(7, kind=2, chunks=11), proof=LYING)
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.download(GENUINE)
    assert fetching.take() == [Check((PROOF,))]


def test_a_liar_that_offers_at_once_and_gives_nothing_does_not_keep_anybody_from_what_others_offer_later() -> (
    None
):
    fetching = Fetching(*"xabc", circle="abc")
    fetching.hear("x", FORGED, proof=LYING)
    assert fetching.wait(0.0) == ANSWER_SECONDS
    assert fetching.take() == [Allocate(FORGED.image)]
    fetching.hear("a", GENUINE, proof=PROOF, now=1.2)
    fetching.download(GENUINE, now=1.3)
    assert fetching.take() == [Check((PROOF,))]


@pytest.mark.parametrize("given", [-1, 0, 1], ids=["nothing", "the digests", "a chunk"])
def test_nor_does_one_by_whom_the_state_is_known(given: int) -> None:
    fetching = Fetching(*"xab", circle="xab")
    fetching.hear("x", FORGED, proof=LYING)
    fetching.wait(0.0)
    fetching.tell(MemoryReady(FORGED.image.size), 1.1)
    if given >= 0:
        fetching.tell(digests_came("x", FORGED), 1.1)
    if given > 0:
        fetching.tell(chunk_came("x", FORGED, 0), 1.1)
    fetching.hear("a", GENUINE, proof=PROOF, now=1.2)
    assert fetching.take() == [Allocate(FORGED.image)], "one of them each: it goes on"
    now = fetching.wait(1.2)
    assert now < 1.2 + 2 * STALL_SECONDS
    fetching.download(GENUINE, now=now)
    assert fetching.take() == [Check((PROOF,))]


def test_nor_do_two_of_which_one_breaks_off_when_it_is_asked_and_the_other_gives_nothing() -> None:
    fetching = Fetching(*"xya", circle="xya")
    for liar in "xy":
        fetching.hear(liar, FORGED, proof=LYING)
    assert fetching.take() == [Allocate(FORGED.image)]
    fetching.tell(PeerLost("x", "reset"), 0.1)
    fetching.hear("x", FORGED, proof=LYING, now=0.2)
    fetching.hear("a", GENUINE, proof=PROOF, now=0.3)
    assert fetching.wait(0.3) < 0.2 + STALL_SECONDS
    assert fetching.take() == [Allocate(GENUINE.image)]


def test_what_is_being_downloaded_is_not_given_up_for_what_strangers_offer() -> None:
    fetching = Fetching(*"axyz", circle="a")
    fetching.hear("a", GENUINE, proof=PROOF)
    assert fetching.take() == [Allocate(GENUINE.image)]
    for stranger in "xyz":
        fetching.hear(stranger, FORGED, proof=LYING, now=0.1)
    assert fetching.take() == []


def test_nothing_ends_it_while_it_is_being_checked() -> None:
    fetching = Fetching("a")
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.download(GENUINE)
    fetching.take()
    assert fetching.machine.deadline == float("inf")
    fetching.tell(PeerLost("a", "reset"), 1.0)
    fetching.tell(Withdrew("cancelled"), 2.0)
    fetching.tell(Woke(), 100.0)
    assert fetching.take() == []
    fetching.tell(Checked("0 signed"), 3.0)
    (end,) = fetching.take()
    assert isinstance(end, Finish)
    assert not end.outcome.ok
    assert end.outcome.reason.startswith("cancelled")


def test_a_mean_for_which_there_is_no_room_is_nobody_s_fault() -> None:
    fetching = Fetching("a")
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.download(GENUINE)
    fetching.take()
    fetching.tell(MemoryRefused("no memory"))
    assert fetching.take() == [Finish(FetchOutcome(ok=False, reason="no memory", unheard=1))]
