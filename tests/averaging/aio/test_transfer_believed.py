"""A peer believes the mean that its circle offers, and takes nothing from liars and strangers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from equipoise.averaging.aio.transfer import Transfer, unpack
from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.replication.answers import LONE_SECONDS, Request, Wish
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
from fakes.cluster import SPEC, Cluster
from fakes.memory import FakeIdentity
from fakes.missed import mean_of, recovered
from fakes.transfer import RUN, TICKET, answer, item_came, offer_of
from fakes.transfer import SPEC as HASH

BEFORE = StateId(7, "ab" * 32)
NEXT = StateId(8, "ef" * 32)
LAST = StateId(9, "0f" * 32)


def keep(mean: EncodedMean, *transfers: Transfer) -> None:
    for transfer in transfers:
        transfer.donor.keep(mean)


async def test_drawn_peers_are_believed_by_those_that_were_in_no_group_with_them(cluster: Cluster) -> None:
    options = msgspec.structs.replace(SPEC.options, strategy="federated", group_size=4)
    spec = RunSpec.create(SPEC.name, SPEC.schema, options)
    transfers = dict(zip("abcdefgh", await cluster.add(*"abcdefgh", spec=spec), strict=True))
    drawn = transfers["a"]._search.draw(BEFORE).peers
    late, mate, *_ = transfers.keys() - drawn
    keep(mean_of("".join(drawn[:2]), BEFORE, spec), *(transfers[peer] for peer in drawn[:2]))
    for peer in transfers:
        transfers[peer].donor.reach(8 if peer in drawn[:2] else 7)
    found, _, _ = await recovered(transfers[late], BEFORE, [mate])
    assert found.ok, found.reason


async def test_a_peer_that_downloaded_a_mean_gives_it_to_others(cluster: Cluster) -> None:
    a, b, c, _ = await cluster.add(*"abcd")
    keep(mean_of("ad", BEFORE), a)
    found, _, _ = await recovered(b, BEFORE, "a")
    await cluster.routers["a"].stop()
    found, _, sources = await recovered(c, BEFORE, "ab")
    assert found.ok, found.reason
    assert set(sources) == {"b"}


async def test_what_this_daemon_keeps_it_asks_nobody_for(cluster: Cluster) -> None:
    await cluster.add(*"ab")
    (late,) = await cluster.add("c")
    mean = mean_of("abc", BEFORE)
    keep(mean, late)
    for _ in range(2):
        found, result, sources = await recovered(late, BEFORE)
        assert (found.digest, sources) == (mean.digest().hex(), {})
        assert found.reason.startswith("missed, and kept here: ")
        assert bool((result == 3.0).all())
        await late.donor._make_image(BEFORE)  # Another peer has asked for it.


async def test_a_peer_that_catches_up_waits_for_no_second_between_two_means(cluster: Cluster) -> None:
    a, b, late = await cluster.add("a", "b", "c")
    for state in (NEXT, LAST):
        keep(mean_of("abc", state), a, b)
    began = asyncio.get_running_loop().time()
    for state in (NEXT, LAST):
        assert (await recovered(late, state, "ab"))[0].ok
    assert a.donor._asks.admits("c", began), "neither question was dropped"


async def test_a_mean_that_takes_the_place_of_another_is_not_dropped_with_it(cluster: Cluster) -> None:
    a, me = await cluster.add("a", "p")
    a.donor.keep(mean_of("abx", NEXT))
    a.donor._driver.tell(AskReceived("p", Ask(SPEC.name, TICKET, SPEC.hash, 0, (), NEXT)))
    await asyncio.sleep(0)
    mean = mean_of("ab", NEXT)
    a.donor.keep(mean)
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
    assert unpack(image, SPEC, BEFORE, FakeIdentity("b").verify, room, "")[1].ok
    with pytest.raises(ValueError, match="expected a join signed by a"):
        unpack(image, SPEC, BEFORE, lambda *signed: False, room, "")
    with pytest.raises(ValueError, match="after epoch 8"):
        unpack(image, SPEC, NEXT, FakeIdentity("b").verify, room, "")


# ---- what is tried, one after another ----


GENUINE, FORGED = offer_of(7), offer_of(7, kind=1)


class Fetching:
    """The machine of one that missed a mean, of which all chunks come as soon as they are asked for."""

    def __init__(self, *peers: str, circle: str = "", quorum: int = 0) -> None:
        wish = Wish(0, 10 * CHUNK_BYTES, GENUINE.state, frozenset(circle))
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


@pytest.mark.parametrize(
    ("peers", "circle", "given", "behind", "options"),
    [
        ("abc", "abc", "ab", "", {}),
        (("a", "ghost"), "ab", "a", "", {}),
        ("abcd", "abcd", "ab", "cd", {"quorum": 2}),
        ("abcd", "bc", "ab", "cd", {"quorum": 2}),
        ("acd", "abcd", "a", "cd", {"quorum": 2}),
    ],
    ids=[
        "most of the circle, of which one is silent",
        "all of the circle that are not gone",
        "the few that a draw chose",
        "one of those few, the other downloaded the state",
        "one of those few, the other is gone",
    ],
)
def test_a_mean_is_believed_of(
    peers: Sequence[str], circle: str, given: str, behind: str, options: dict[str, Any]
) -> None:
    fetching = Fetching(*peers, circle=circle, **options)
    for peer in behind:
        fetching.hear(peer, epoch=GENUINE.state.epoch)
    for peer in given:
        assert fetching.take() == [], "one is not enough, if there are others"
        fetching.hear(peer, GENUINE)
    fetching.download(GENUINE)
    assert fetching.end().ok


@pytest.mark.parametrize(
    ("peers", "circle", "forged", "genuine", "behind", "quorum", "said"),
    [
        ("xy", "ab", "xy", "", "", 0, "0 of the 2"),
        ("xy", "", "xy", "", "", 0, "0 of the 0"),
        ("abxy", "ab", "xy", "", "ab", 2, "0 of the 2"),
        ("abcd", "abcd", "ab", "cd", "", 2, "2 of the 4"),
    ],
    ids=["the circle is gone", "it knows nobody", "strangers make no round", "as many have another"],
)
def test_a_mean_is_not_believed_of_strangers_nor_against_as_many(
    peers: str, circle: str, forged: str, genuine: str, behind: str, quorum: int, said: str
) -> None:
    fetching = Fetching(*peers, circle=circle, quorum=quorum)
    for names, offers in ((forged, [FORGED]), (genuine, [GENUINE]), (behind, [])):
        for peer in names:
            fetching.hear(peer, *offers, epoch=GENUINE.state.epoch + bool(offers))
    assert f"{said} peers that vouch" in fetching.end().reason


def test_a_peer_of_the_circle_that_is_lost_is_waited_for_no_longer() -> None:
    fetching = Fetching(*"ab", circle="ab")
    fetching.hear("a", GENUINE)
    assert fetching.take() == []
    fetching.tell(PeerLost("b", "refused"), 0.1)
    fetching.download(GENUINE, now=0.1)
    assert fetching.end().ok


@pytest.mark.parametrize("mates", ["b", "bcd"])
def test_a_mate_is_not_believed_against_others_that_are_silent_as_they_are_in_mid_round(mates: str) -> None:
    fetching = Fetching("a", *mates, circle="a" + mates)
    fetching.hear("a", FORGED)
    assert fetching.wait(0.0) == LONE_SECONDS
    end = fetching.end()
    assert f"1 of the {1 + len(mates)} peers that vouch" in end.reason
    assert end.unheard == 1 + len(mates)


def test_a_donor_that_dies_is_no_reason_to_doubt_what_most_of_the_circle_offered() -> None:
    fetching = Fetching(*"abc", circle="abc")
    fetching.hear("a", GENUINE)
    fetching.hear("b", GENUINE)
    fetching.tell(PeerLost("a", "reset"), 0.1)
    fetching.hear("c", FORGED, now=0.1)
    fetching.download(GENUINE, now=5.0)
    assert fetching.end().ok


def test_one_that_offers_more_than_a_mean_can_have_does_not_keep_others_from_giving_it() -> None:
    fetching = Fetching("x", "a", circle="a")
    fetching.hear("x", offer_of(7, kind=2, chunks=11))
    fetching.hear("a", GENUINE)
    fetching.download(GENUINE)
    assert fetching.end().ok


def test_what_is_being_downloaded_is_not_given_up_for_what_strangers_offer() -> None:
    fetching = Fetching(*"axyz", circle="a")
    fetching.hear("a", GENUINE)
    assert fetching.take() == [Allocate(GENUINE.image)]
    for stranger in "xyz":
        fetching.hear(stranger, FORGED, now=0.1)
    assert fetching.take() == []
