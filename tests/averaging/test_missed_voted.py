"""Whose mean it is that was missed: proved by votes, whoever gives it, and what liars and strangers come to."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from equipoise.averaging.aio import keeping
from equipoise.averaging.aio.keeping import Wanted
from equipoise.averaging.aio.transfer import Transfer
from equipoise.averaging.allreduce.messages import Commit, Decision
from equipoise.averaging.state import StateId
from equipoise.averaging.transfer.events import (
    Allocate,
    AnswerReceived,
    Check,
    Checked,
    ChunkReceived,
    DigestsReceived,
    Fail,
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
from equipoise.averaging.transfer.fetch import Fetch, Request
from equipoise.averaging.transfer.image import CHUNK_BYTES
from equipoise.averaging.transfer.mean import EncodedMean, MeanError
from equipoise.averaging.transfer.messages import Answer, AskChunks, AskDigests, Offer
from equipoise.averaging.transfer.votes import Circle
from fakes.cluster import SPEC, Cluster
from fakes.memory import FakeIdentity
from fakes.missed import mean_of, recovered, round_of
from fakes.transfer import RUN, TICKET, offer_of
from fakes.transfer import SPEC as HASH

BEFORE = StateId(7, "ab" * 32)
NEXT = StateId(8, "ef" * 32)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.stop()


def keeps(mean: EncodedMean, proof: Commit, *transfers: Transfer) -> None:
    for transfer in transfers:
        transfer.keep(mean, lambda: proof)


async def test_the_votes_of_its_own_group_tell_whose_mean_it_is_however_many_come_later(
    cluster: Cluster,
) -> None:
    a, b, away = await cluster.add("a", "b", "c")
    away.begin(round_of("abc", BEFORE))
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
    away.begin(round_of("abcd", BEFORE))
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
    assert "half of the 0 peers by whom this one knows its state" in found.reason
    found, _, _ = await recovered(late, BEFORE, proved=True)
    assert found.ok, found.reason


async def test_those_who_gave_a_snapshot_tell_what_came_next(cluster: Cluster) -> None:
    *donors, late = await cluster.add("a", "b", "c")
    for donor in donors:
        await donor.offer(BEFORE, memoryview(b"a state"))
    fetched = await late.fetch(BEFORE.epoch, 100, 20.0, keeping.room)
    assert fetched.ok, fetched.reason
    keeps(*mean_of("abmn", BEFORE), *donors)
    keeps(*mean_of("bmnop", NEXT, votes="bmn"), *donors)
    for state in (BEFORE, NEXT):  # The first mean's group is known by its votes, and tells of the second.
        found, _, _ = await recovered(late, state, proved=False)
        assert found.ok, found.reason


async def test_newcomers_who_say_no_state_in_a_round_tell_nothing_of_it(cluster: Cluster) -> None:
    a, away = await cluster.add("a", "b")
    away.begin(round_of("ab", BEFORE))
    away.begin(round_of("bxyz", None))
    keeps(*mean_of("xyz", NEXT), a)
    found, _, _ = await recovered(away, NEXT, proved=False)
    assert "half of the 1 peer by whom this one knows its state, 0 of them voted" in found.reason


async def test_a_mean_of_strangers_is_refused_and_the_group_s_is_taken_from_the_next(
    cluster: Cluster,
) -> None:
    a, away, *liars = await cluster.add("a", "c", "x", "y")
    away.begin(round_of("abc", BEFORE))
    mean, proof = mean_of("ab", NEXT)
    keeps(mean, proof, a)
    keeps(*mean_of("vwxyz", NEXT), *liars)
    found, _, sources = await recovered(away, NEXT, proved=False)
    assert found.digest == mean.digest().hex(), found.reason
    assert "a" in sources


@pytest.mark.parametrize("names", ["xyz", "abcvwxyz"])
async def test_where_only_strangers_voted_for_one_there_is_none(cluster: Cluster, names: str) -> None:
    away, _, liar = await cluster.add("c", "a", "x")
    away.begin(round_of("abc", BEFORE))
    keeps(*mean_of(names, NEXT, votes=names.removeprefix("abc")), liar)
    found, _, _ = await recovered(away, NEXT, proved=False)
    assert not found.ok
    assert "none of 1 peer that answered keeps the mean after epoch 8" in found.reason
    assert "x: expected votes of more than half of the 2 peers by whom this one knows" in found.reason


async def test_a_mean_of_too_few_of_its_round_is_not_even_offered(cluster: Cluster) -> None:
    a, away = await cluster.add("a", "b")
    away.begin(round_of("ab", BEFORE))
    keeps(*mean_of("ab", BEFORE, votes="a"), a)
    found, _, _ = await recovered(away, BEFORE, proved=False)
    assert found.reason == "none of 1 peer that answered keeps the mean after epoch 7"
    assert not a._means


def test_who_receives_one_checks_its_votes_whatever_the_donor_did() -> None:
    mean, proof = mean_of("ab", BEFORE, votes="a")
    wanted = Wanted(SPEC, BEFORE, Circle.of(mean.manifest, "b"))
    image, room = memoryview(mean.image()), lambda: torch.empty(SPEC.schema.size)
    with pytest.raises(MeanError, match="more than half of its round's 2 members, 1 signed"):
        keeping.decode(image, wanted, [proof], FakeIdentity("b").verify, room)
    _, both = mean_of("ab", BEFORE)
    outcome, _ = keeping.decode(image, wanted, [proof, both], FakeIdentity("b").verify, room)
    assert outcome.ok


# ---- what is tried, one after another ----


PROOF = Commit(0, Decision(0b11, 0b11), b"d" * 32, 0b11, ((0, b"a's"), (1, b"b's")))
ANOTHER = Commit(4, Decision(0b11, 0b11), b"d" * 32, 0b11, ((0, b"a's"), (1, b"b's")))
GENUINE, FORGED = offer_of(7), offer_of(7, kind=1)


class Fetching:
    """The machine of one that missed a mean, of which all chunks come as soon as they are asked for."""

    def __init__(self, *peers: str) -> None:
        self.machine = Fetch(
            Request(RUN, HASH, TICKET, 0, 10 * CHUNK_BYTES, after=GENUINE.state), 0.0, timeout=60.0
        )
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

    def hear(self, peer: str, *offers: Offer, proof: Commit | None = None) -> None:
        self.tell(AnswerReceived(peer, Answer(RUN, TICKET, 8, (), offers, proof)))

    def download(self, offer: Offer) -> None:
        assert self.take() == [Allocate(offer.image)]
        self.tell(MemoryReady(offer.image.size))
        while self.asked:
            peer, chunk = self.asked.pop(0)
            here = ChunkReceived(peer, offer.image, chunk, True)
            self.tell(DigestsReceived(peer, offer.image, True) if chunk < 0 else here)

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
    assert end.donors == {"a", "b"}


def test_what_is_not_proved_bars_all_who_offer_it_and_the_next_is_tried() -> None:
    fetching = Fetching("x", "y", "a")
    fetching.hear("x", FORGED, proof=PROOF)
    fetching.hear("y", FORGED)
    fetching.download(FORGED)
    assert fetching.take() == [Check((PROOF,))]
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.tell(Checked("0 signed"))
    fetching.download(GENUINE)
    assert fetching.take() == [Check((PROOF,))]
    fetching.tell(Checked(""))
    (end,) = fetching.take()
    assert isinstance(end, Finish)
    assert end.sources == {"a": GENUINE.image.chunks}
    assert "x: 0 signed; y: 0 signed" in end.reason


def test_one_that_offers_the_genuine_mean_without_votes_does_not_keep_others_from_proving_it() -> None:
    fetching = Fetching("x", "a")
    fetching.tell(PeerLost("a", "it is slow", False))
    fetching.hear("x", GENUINE)
    fetching.download(GENUINE)
    assert fetching.take() == [Check(())]
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.tell(Checked("0 signed"))
    assert fetching.take() == [Check((PROOF,))], "at once, for all of it is here"


def test_where_nobody_is_left_the_reason_says_what_was_wrong_with_each() -> None:
    fetching = Fetching("x", "b")
    fetching.hear("b")
    fetching.hear("x", FORGED)
    fetching.download(FORGED)
    fetching.take()
    fetching.tell(Checked("0 signed"))
    assert fetching.take() == [Fail("none of 1 peer that answered keeps the mean after epoch 7; x: 0 signed")]


def test_one_that_offers_more_than_a_mean_can_have_does_not_keep_others_from_giving_it() -> None:
    fetching = Fetching("x", "a")
    fetching.hear("x", offer_of(7, kind=2, chunks=11))
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.download(GENUINE)
    assert fetching.take() == [Check((PROOF,))]


def test_nothing_ends_it_while_it_is_being_checked() -> None:
    fetching = Fetching("a")
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.download(GENUINE)
    fetching.take()
    assert fetching.machine.deadline == float("inf")
    fetching.tell(PeerLost("a", "reset", False), 1.0)
    fetching.tell(Withdrew("cancelled"), 2.0)
    fetching.tell(Woke(), 100.0)
    assert fetching.take() == []
    fetching.tell(Checked("0 signed"), 3.0)
    (end,) = fetching.take()
    assert isinstance(end, Fail)
    assert end.reason.startswith("cancelled")


def test_a_mean_for_which_there_is_no_room_is_nobody_s_fault() -> None:
    fetching = Fetching("a")
    fetching.hear("a", GENUINE, proof=PROOF)
    fetching.download(GENUINE)
    fetching.take()
    fetching.tell(MemoryRefused("no memory"))
    assert fetching.take() == [Fail("no memory", unheard=0)]
