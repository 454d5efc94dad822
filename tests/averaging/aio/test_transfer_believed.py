"""A peer believes the mean that its circle offers, and takes nothing from liars and strangers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from equipoise.averaging.aio.transfer import Transfer, unpack
from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.replication.answers import ANSWER_SECONDS, LONE_SECONDS, Request, Wish
from equipoise.averaging.replication.chunks import CHUNK_BYTES
from equipoise.averaging.replication.client import Fetch
from equipoise.averaging.replication.messages import Ask, AskItems, Offer
from equipoise.averaging.replication.transfer_events import (
    Allocate,
    AnswerReceived,
    AskReceived,
    FetchEvent,
    Finish,
    MemoryReady,
    PeerLost,
    PeersSeen,
    Send,
    Woke,
)
from equipoise.averaging.replication.update import EncodedMean
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.timing import STALL_SECONDS
from fakes.cluster import SPEC, Cluster, Memory
from fakes.memory import FakeIdentity
from fakes.missed import mean_of, recovered
from fakes.transfer import RUN, TICKET, answer, item_came, offer_of
from fakes.transfer import SPEC as HASH

BEFORE = StateId(7, "ab" * 32)
NEXT = StateId(8, "ef" * 32)
LAST = StateId(9, "0f" * 32)


def keep(mean: EncodedMean, *transfers: Transfer) -> None:
    for transfer in transfers:
        transfer.keep(mean)


async def test_more_than_half_of_its_circle_tell_whose_mean_it_is_however_many_come_later(
    cluster: Cluster,
) -> None:
    a, b, _, away, *liars = await cluster.add(*"abcpvwxyz")
    mean = mean_of("abcp", BEFORE)
    keep(mean, a, b)
    keep(mean_of("vwxyz", BEFORE), *liars)
    found, result, sources = await recovered(away, BEFORE, "abc")
    assert found.ok, found.reason
    assert found.digest == mean.digest().hex()
    assert bool((result == 4.0).all())
    assert set(sources) <= {"a", "b"}


async def test_drawn_peers_are_believed_by_those_that_were_in_no_group_with_them(cluster: Cluster) -> None:
    options = msgspec.structs.replace(SPEC.options, strategy="federated", group_size=4)
    spec = RunSpec.create(SPEC.name, SPEC.schema, options)
    transfers = dict(zip("abcdefgh", await cluster.add(*"abcdefgh", spec=spec), strict=True))
    drawn = transfers["a"].draw(BEFORE).peers
    late, mate, *_ = transfers.keys() - drawn
    keep(mean_of("".join(drawn[:2]), BEFORE, spec), *(transfers[peer] for peer in drawn[:2]))
    for peer in transfers:
        transfers[peer].reach(8 if peer in drawn[:2] else 7)
    found, _, _ = await recovered(transfers[late], BEFORE, [mate])
    assert found.ok, found.reason


async def test_a_peer_that_downloaded_a_mean_gives_it_to_others(cluster: Cluster) -> None:
    a, b, c, _ = await cluster.add(*"abcd")
    keep(mean_of("ad", BEFORE), a)
    found, _, _ = await recovered(b, BEFORE, "d", proved=True)
    assert found.ok, found.reason
    assert not b.kept_bytes, "its digest is still to be proved"
    found, _, _ = await recovered(b, BEFORE, "a")
    await cluster.routers["a"].stop()
    found, _, sources = await recovered(c, BEFORE, "ab")
    assert found.ok, found.reason
    assert set(sources) == {"b"}


@pytest.mark.parametrize("others", ["", "yz"])
async def test_one_liar_in_a_circle_of_three_is_not_believed_however_many_strangers_stand_by_it(
    cluster: Cluster, others: str
) -> None:
    *_, liar, away = await cluster.add(*"abxp")
    strangers = await cluster.add(*others)
    keep(mean_of("xyz", BEFORE), liar, *strangers)
    found, _, _ = await recovered(away, BEFORE, "abx")
    assert (
        found.reason
        == "1 of the 3 peers that vouch for this peer's state offer the same as the mean after epoch 7"
    )


async def test_half_of_a_circle_are_not_enough(cluster: Cluster) -> None:
    a, _, away = await cluster.add(*"abp")
    keep(mean_of("abp", BEFORE), a)
    got = await away.fetch(
        Wish(after=BEFORE, circle=frozenset("ab")), 20.0, lambda size: memoryview(bytearray(size))
    )
    assert "1 of the 2 peers that vouch" in got.reason
    assert got.unheard == 1


async def test_who_knows_nobody_believes_only_what_the_next_state_will_prove(cluster: Cluster) -> None:
    a, b, late = await cluster.add("a", "b", "c")
    keep(mean_of("ab", BEFORE), a, b)
    found, _, _ = await recovered(late, BEFORE)
    assert not found.ok
    assert "0 of the 0 peers that vouch for this peer's state" in found.reason
    found, _, _ = await recovered(late, BEFORE, proved=True)
    assert found.ok, found.reason


async def test_one_donor_is_enough_for_who_knows_the_next_state(cluster: Cluster) -> None:
    a, *_, away = await cluster.add(*"abcp")
    mean = mean_of("abc", BEFORE)
    keep(mean, a)
    found, _, _ = await recovered(away, BEFORE, "abc", proved=True)
    assert found.digest == mean.digest().hex(), found.reason


async def test_who_copies_the_offer_of_a_snapshot_outvotes_nobody_who_had_a_say_in_it(
    cluster: Cluster,
) -> None:
    *others, me = await cluster.add(*"abcdewxyz", "p")
    for one in others:
        one.reach(BEFORE.epoch)
    for one in (*others[:3], *others[5:]):
        await one.offer(BEFORE, memoryview(b"a state"))
    fetched = await me.fetch(Wish(BEFORE.epoch, 100), 20.0, Memory().room)
    assert fetched.ok, fetched.reason
    assert set(fetched.voters) == set("abcdewxyz")
    keep(mean_of("wxyz", BEFORE), *others[5:])
    found, _, _ = await recovered(me, BEFORE, fetched.voters)
    assert "4 of the 9 peers that vouch" in found.reason


async def test_a_peer_that_catches_up_waits_for_no_second_between_two_means(cluster: Cluster) -> None:
    a, b, late = await cluster.add("a", "b", "c")
    for state in (NEXT, LAST):
        keep(mean_of("abc", state), a, b)
    began = asyncio.get_running_loop().time()
    for state in (NEXT, LAST):
        assert (await recovered(late, state, "ab"))[0].ok
    assert a._asks.admits("c", began), "neither question was dropped"


async def test_a_mean_that_takes_the_place_of_another_is_not_dropped_with_it(cluster: Cluster) -> None:
    a, me = await cluster.add("a", "p")
    a.keep(mean_of("abx", NEXT))
    a._driver.tell(AskReceived("p", Ask(SPEC.name, TICKET, SPEC.hash, 0, (), NEXT)))
    await asyncio.sleep(0)
    mean = mean_of("ab", NEXT)
    a.keep(mean)
    found, _, _ = await recovered(me, NEXT, "a")
    assert found.digest == mean.digest().hex(), found.reason


async def test_what_is_no_mean_of_this_run_is_not_taken_whoever_offers_it(cluster: Cluster) -> None:
    a, me = await cluster.add("a", "p")
    mean = mean_of("ab", NEXT)
    keep(EncodedMean(mean.manifest, mean.contributors, mean.parts[:-1]), a)
    found, _, _ = await recovered(me, NEXT, "a")
    assert not found.ok
    assert "bytes of encoded values" in found.reason


async def test_where_there_is_no_room_there_is_none_for_any(cluster: Cluster) -> None:
    a, me = await cluster.add("a", "p")
    keep(mean_of("ab", NEXT), a)

    def none(size: int) -> memoryview:
        raise ValueError("no memory for it")

    got = await me.fetch(Wish(after=NEXT, circle=frozenset("a")), 20.0, none)
    assert got.reason == "no memory for it"
    assert got.unheard == 1, "it may ask again"


def test_a_join_that_its_peer_did_not_sign_makes_no_mean() -> None:
    mean = mean_of("ab", BEFORE)
    image, room = memoryview(mean.image()), lambda size: memoryview(bytearray(size))
    assert unpack(image, SPEC, BEFORE, FakeIdentity("b").verify, room)[1].ok
    with pytest.raises(ValueError, match="expected a join signed by a"):
        unpack(image, SPEC, BEFORE, lambda *signed: False, room)
    with pytest.raises(ValueError, match="after epoch 8"):
        unpack(image, SPEC, NEXT, FakeIdentity("b").verify, room)


# ---- what is tried, one after another ----


GENUINE, FORGED = offer_of(7), offer_of(7, kind=1)


class Fetching:
    """The machine of one that missed a mean, of which all chunks come as soon as they are asked for."""

    def __init__(self, *peers: str, circle: str = "", proved: bool = False, quorum: int = 0) -> None:
        wish = Wish(0, 10 * CHUNK_BYTES, GENUINE.state, frozenset(circle), proved=proved)
        request = Request(RUN, HASH, TICKET, wish, quorum)
        self.machine = Fetch(request, 0.0, timeout=60.0)
        self.done: list[object] = []
        self.asked: list[tuple[str, int]] = []
        self.tell(PeersSeen(peers))

    def tell(self, event: FetchEvent, now: float = 0.0) -> None:
        for action in self.machine.handle(event, now):
            match action:
                case Send(to, AskItems(items=items)):
                    self.asked += [(to, item) for item in items]
                case Send():
                    pass
                case _:
                    self.done.append(action)

    def hear(self, peer: str, *offers: Offer, now: float = 0.0, epoch: int = 8) -> None:
        self.tell(AnswerReceived(peer, answer(epoch, *offers)), now)

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
            peer, item = self.asked.pop(0)
            self.tell(item_came(peer, offer, item), now)

    def take(self) -> list[object]:
        done, self.done = self.done, []
        return done

    def end(self) -> FetchOutcome:
        (end,) = self.take()
        assert isinstance(end, Finish)
        return end.outcome


def test_a_dead_peer_of_the_circle_keeps_nobody_waiting_while_most_of_it_offer_the_mean() -> None:
    fetching = Fetching(*"abc", circle="abc")
    fetching.hear("a", GENUINE)
    assert fetching.take() == []
    fetching.hear("b", GENUINE)
    fetching.download(GENUINE)
    assert fetching.end().ok


@pytest.mark.parametrize("mates", ["b", "bcd"])
def test_a_mate_is_not_believed_against_others_that_are_silent_as_they_are_in_mid_round(mates: str) -> None:
    fetching = Fetching("a", *mates, circle="a" + mates)
    fetching.hear("a", FORGED)
    assert fetching.wait(0.0) == LONE_SECONDS
    end = fetching.end()
    assert f"1 of the {1 + len(mates)} peers that vouch" in end.reason
    assert end.unheard == 1 + len(mates)


def test_peers_of_the_circle_that_are_gone_do_not_count() -> None:
    fetching = Fetching("a", "ghost", circle="ab")
    fetching.hear("a", GENUINE)
    fetching.download(GENUINE)
    assert fetching.end().ok
    fetching = Fetching(*"ab", circle="ab")
    fetching.hear("a", GENUINE)
    assert fetching.take() == []
    fetching.tell(PeerLost("b", "refused"), 0.1)
    fetching.download(GENUINE, now=0.1)
    assert fetching.end().ok


def test_a_stranger_is_not_believed_though_the_whole_circle_is_gone() -> None:
    fetching = Fetching("x", "y", circle="ab")
    fetching.hear("x", FORGED)
    fetching.hear("y", FORGED)
    assert "0 of the 2 peers that vouch" in fetching.end().reason


@pytest.mark.parametrize(
    "circle", ["abcd", "bc"], ids=["all", "one of the few, the other downloaded the state"]
)
def test_the_few_that_a_draw_chose_are_believed_by_all_that_have_missed_their_round(circle: str) -> None:
    behind, ahead = GENUINE.state.epoch, GENUINE.state.epoch + 1
    fetching = Fetching(*"abcd", circle=circle, quorum=2)
    for peer in "cd":
        fetching.hear(peer, epoch=behind)
    fetching.hear("a", GENUINE, epoch=ahead)
    assert fetching.take() == [], "one makes no round"
    fetching.hear("b", GENUINE, epoch=ahead)
    fetching.download(GENUINE)
    assert fetching.end().ok


def test_strangers_make_no_round_that_nobody_of_the_circle_has() -> None:
    fetching = Fetching(*"abxy", circle="ab", quorum=2)
    for peer in "xy":
        fetching.hear(peer, FORGED)
    for peer in "ab":
        fetching.hear(peer, epoch=GENUINE.state.epoch)
    assert "0 of the 2 peers that vouch" in fetching.end().reason


def test_they_are_not_believed_against_as_many_that_are_beyond_with_another_mean() -> None:
    fetching = Fetching(*"abcd", circle="abcd", quorum=2)
    for peer in "ab":
        fetching.hear(peer, FORGED)
    for peer in "cd":
        fetching.hear(peer, GENUINE)
    assert "2 of the 4 peers that vouch" in fetching.end().reason


def test_one_of_them_is_believed_once_the_other_is_gone() -> None:
    fetching = Fetching(*"acd", circle="abcd", quorum=2)
    for peer in "cd":
        fetching.hear(peer, epoch=GENUINE.state.epoch)
    fetching.hear("a", GENUINE)
    fetching.download(GENUINE)
    assert fetching.end().ok


def test_a_donor_that_dies_is_no_reason_to_doubt_what_most_of_the_circle_offered() -> None:
    fetching = Fetching(*"abc", circle="abc")
    fetching.hear("a", GENUINE)
    fetching.hear("b", GENUINE)
    fetching.tell(PeerLost("a", "reset"), 0.1)
    fetching.hear("c", FORGED, now=0.1)
    fetching.download(GENUINE, now=5.0)
    assert fetching.end().ok


def test_one_that_offers_more_than_a_mean_can_have_does_not_keep_others_from_giving_it() -> None:
    fetching = Fetching("x", "a", proved=True)
    fetching.hear("x", offer_of(7, kind=2, chunks=11))
    fetching.hear("a", GENUINE)
    fetching.download(GENUINE)
    assert fetching.end().ok


def test_a_liar_that_offers_at_once_and_gives_nothing_does_not_keep_anybody_from_what_others_offer_later() -> (
    None
):
    fetching = Fetching(*"xabc", circle="abc", proved=True)
    fetching.hear("x", FORGED)
    assert fetching.wait(0.0) == ANSWER_SECONDS
    assert fetching.take() == [Allocate(FORGED.image)]
    fetching.hear("a", GENUINE, now=1.2)
    fetching.download(GENUINE, now=1.3)
    assert fetching.end().ok


@pytest.mark.parametrize("given", [0, 1, 2], ids=["nothing", "the digests", "a chunk"])
def test_nor_does_one_of_the_circle(given: int) -> None:
    fetching = Fetching(*"xab", circle="xab", proved=True)
    fetching.hear("x", FORGED)
    fetching.wait(0.0)
    fetching.tell(MemoryReady(FORGED.image.size), 1.1)
    for item in range(given):
        fetching.tell(item_came("x", FORGED, item), 1.1)
    fetching.hear("a", GENUINE, now=1.2)
    assert fetching.take() == [Allocate(FORGED.image)], "one of them each: it goes on"
    now = fetching.wait(1.2)
    assert now < 1.2 + 2 * STALL_SECONDS
    fetching.download(GENUINE, now=now)
    assert fetching.end().ok


def test_nor_do_two_of_which_one_breaks_off_when_it_is_asked_and_the_other_gives_nothing() -> None:
    fetching = Fetching(*"xyabc", circle="xyabc", proved=True)
    for liar in "xy":
        fetching.hear(liar, FORGED)
    assert fetching.wait(0.0) == ANSWER_SECONDS
    assert fetching.take() == [Allocate(FORGED.image)]
    fetching.tell(PeerLost("x", "reset"), 1.1)
    fetching.hear("x", FORGED, now=1.2)
    fetching.hear("a", GENUINE, now=1.3)
    assert fetching.wait(1.3) < 1.2 + STALL_SECONDS
    assert fetching.take() == [Allocate(GENUINE.image)]


def test_what_is_being_downloaded_is_not_given_up_for_what_strangers_offer() -> None:
    fetching = Fetching(*"axyz", circle="a", proved=True)
    fetching.hear("a", GENUINE)
    assert fetching.take() == [Allocate(GENUINE.image)]
    for stranger in "xyz":
        fetching.hear(stranger, FORGED, now=0.1)
    assert fetching.take() == []
