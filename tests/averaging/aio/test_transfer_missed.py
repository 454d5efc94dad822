"""A mean that was missed: kept by those who have it, and served to who asks for it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from equipoise.averaging.aio.transfer import unpack
from equipoise.averaging.manifest import ManifestError
from equipoise.averaging.options import RunOptions
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.replication.answers import LONE_SECONDS, Request, UpdateQuery, Wish
from equipoise.averaging.replication.chunks import ImageId
from equipoise.averaging.replication.messages import Answer, Ask, AskItems, Offer
from equipoise.averaging.replication.server import KEPT_MEANS, OWN_MEANS, Server
from equipoise.averaging.replication.transfer_events import (
    AskReceived,
    DonorEvent,
    Drop,
    EpochReached,
    MakeImage,
    MeanKept,
    MeanReady,
    RoundBegan,
    RoundOver,
    Send,
    SendBody,
)
from equipoise.averaging.replication.update import MAX_MANIFEST_BYTES
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from fakes.cluster import Cluster
from fakes.memory import FakeIdentity
from fakes.missed import kept_by, recovered, rounds
from fakes.transfer import RUN, TICKET, answer, offer_of
from fakes.vectors import averaged

SIZE = 3_000_000
SPEC = RunSpec.create("run/step", Schema.of({"w": torch.zeros(SIZE)}))
BEFORE = StateId(7, "ab" * 32)
OTHER = StateId(7, "cd" * 32)


def room(size: int) -> memoryview:
    return memoryview(bytearray(size))


async def test_one_that_missed_a_round_gets_its_mean_bit_by_bit_from_all(cluster: Cluster) -> None:
    await cluster.add("a", "b", "c", spec=SPEC)
    (outcome, mean), (other, _), _ = await rounds(cluster, "abc", BEFORE, SPEC, boast="b", reports=True)
    assert outcome.ok, outcome.reason
    assert set(outcome.metrics) == set(outcome.evaluation) == {"score"}
    (late,) = await cluster.add("d", spec=SPEC)
    found, result, sources = await recovered(late, BEFORE, "abc")
    assert found.ok, found.reason
    assert found.contributors == outcome.contributors == {"a": 1.0, "b": 10.0, "c": 1.0}
    assert found.capped == outcome.capped == {"b": 1e12}
    for same in (found, other):
        assert (same.digest, same.group) == (outcome.digest, outcome.group)
        assert (same.metrics, same.evaluation) == (outcome.metrics, outcome.evaluation)
    assert found.state == BEFORE
    assert torch.equal(result, mean)
    assert len(sources) > 1


async def test_a_missed_mean_of_joined_contributions_is_recovered(cluster: Cluster) -> None:
    spec = RunSpec.create("run/step", Schema.of({"w": torch.zeros(70_000)}), RunOptions(codec="sparse"))
    await cluster.add("a", "b", "c", spec=spec)
    (outcome, mean), *_ = await rounds(cluster, "abc", BEFORE, spec, boast="b")
    (late,) = await cluster.add("d", spec=spec)
    found, result, _ = await recovered(late, BEFORE, "abc")
    assert (found.digest, found.contributors) == (outcome.digest, outcome.contributors)
    assert torch.equal(result, mean)
    assert late.donor._means[BEFORE].size == 3 * spec.layout.encoded_size == found.bytes_received


async def test_members_have_it_too_and_see_whether_they_contributed(cluster: Cluster) -> None:
    *_, third = await cluster.add("a", "b", "c", spec=SPEC)
    await rounds(cluster, "abc", BEFORE, SPEC)
    found, _, _ = await recovered(third, BEFORE, "ab")
    assert found.counted("c")


async def test_what_nobody_keeps_is_not_waited_for(cluster: Cluster) -> None:
    *_, third = await cluster.add("a", "b", "c", spec=SPEC)
    found, _, _ = await recovered(third, BEFORE, "ab")
    assert not found.ok
    assert found.reason == "none of 2 peers that answered keeps the mean after epoch 7"
    await rounds(cluster, "abc", BEFORE, SPEC)
    found, _, _ = await recovered(third, OTHER, "ab")
    assert not found.ok


async def test_it_tells_how_many_are_behind(cluster: Cluster) -> None:
    one, other, last = await cluster.add("a", "b", "c", spec=SPEC)
    one.donor.reach(7)
    other.donor.reach(6)
    got = await last.fetch(Wish(after=BEFORE), 20.0, room)
    assert got.behind == 1


async def test_no_byte_of_a_mean_can_be_changed(cluster: Cluster) -> None:
    keeper, _ = await cluster.add("a", "b", spec=SPEC)
    (outcome, _), *_ = await rounds(cluster, "ab", BEFORE, SPEC)
    mean = kept_by(keeper, BEFORE)
    image = bytes(mean.image())
    assert len(image) <= SPEC.layout.encoded_size + MAX_MANIFEST_BYTES
    verify = FakeIdentity("c").verify

    def digest(changed: bytes) -> str:
        try:
            return unpack(memoryview(changed), SPEC, BEFORE, verify, room, "")[1].digest
        except (ValueError, FrameRefused):
            return ""

    assert digest(image) == outcome.digest
    head = len(image) - mean.size
    for at in [*range(0, head, 7), *range(head, len(image), len(image) // 16), len(image) - 1]:
        changed = bytearray(image)
        changed[at] ^= 0x10
        assert digest(bytes(changed)) != outcome.digest, at
    for length in (0, 3, head - 1, head, len(image) - 1):
        assert digest(image[:length]) == ""
    assert digest(image + b"x") == ""


async def test_it_is_no_mean_of_another_state_or_run(cluster: Cluster) -> None:
    keeper, _ = await cluster.add("a", "b", spec=SPEC)
    await rounds(cluster, "ab", BEFORE, SPEC)
    image, verify = memoryview(kept_by(keeper, BEFORE).image()), FakeIdentity("c").verify
    with pytest.raises(ValueError, match="after epoch 7"):
        unpack(image, SPEC, OTHER, verify, room, "")
    other = RunSpec.create("other/step", SPEC.schema)
    with pytest.raises(ManifestError, match="spec"):
        unpack(image, other, BEFORE, verify, room, "")


async def test_rounds_without_a_state_are_not_kept(cluster: Cluster) -> None:
    keeper, _ = await cluster.add("a", "b", spec=SPEC)
    await asyncio.gather(
        *(
            averaged(cluster.routers[name]._runs[SPEC.name], torch.ones(SIZE), torch.empty(SIZE), 1.0, 20.0)
            for name in "ab"
        )
    )
    assert not keeper.donor._means


async def test_a_round_of_peers_that_only_attend_leaves_no_mean(cluster: Cluster) -> None:
    """It changes no state: who took its mean for a missed update would leave the state of all others."""
    keeper, _ = await cluster.add("a", "b", spec=SPEC)
    (outcome, _), _ = await rounds(cluster, "ab", BEFORE, SPEC, weight=ATTENDANCE_LIMIT)
    assert outcome.ok
    assert outcome.state == BEFORE
    assert not keeper.donor._means


# ---- what is kept ----


def state(epoch: int) -> StateId:
    return StateId(epoch, f"{epoch:064x}")


MOST = 10**6


def offered(donor: Server, event: DonorEvent) -> tuple[Offer, ...]:
    """The offers in the one answer that follows from an event."""
    [action] = donor.handle(event, 0.0)
    assert isinstance(action, Send)
    assert isinstance(action.message, Answer)
    return action.message.offers


def dropped(donor: Server, epoch: int, size: int) -> list[StateId]:
    """Have the donor keep the mean after an epoch; returns the states whose means go."""
    actions = donor.handle(MeanKept(state(epoch), size, MOST), 0.0)
    return [one.before for one in actions if isinstance(one, Drop)]


def test_the_last_few_are_kept() -> None:
    donor = Server()
    gone = [one for epoch in range(KEPT_MEANS + 2) for one in dropped(donor, epoch, 100)]
    assert gone == [state(0), state(1)]


def test_no_more_than_so_many_bytes_are_kept_but_always_the_last() -> None:
    donor = Server()
    assert dropped(donor, 0, MOST // 2) == []
    assert dropped(donor, 1, MOST // 2) == []
    assert dropped(donor, 2, 1) == [state(0)]
    assert dropped(donor, 3, 2 * MOST) == [state(1), state(2)]


def test_what_its_own_trainer_lacks_is_kept_for_longer() -> None:
    donor = Server()
    donor.handle(EpochReached(2), 0.0)
    gone = [one for epoch in range(2 + OWN_MEANS + 1) for one in dropped(donor, epoch, MOST)]
    assert gone == [state(0), state(1), state(2)]


def test_what_is_being_downloaded_goes_last() -> None:
    donor, image = Server(), ImageId(b"d" * 32, 100)
    dropped(donor, 0, MOST // 2)
    dropped(donor, 1, MOST // 2)
    ask = AskReceived("c", Ask(RUN, TICKET, SPEC.hash, 0, (), state(0)))
    assert donor.handle(ask, 0.0) == [MakeImage(state(0))]
    assert donor.handle(ask, 0.0) == [], "the image is being made"
    assert offered(donor, MeanReady(state(0), image)) == (Offer(state(0), image),)
    [sent] = donor.handle(AskReceived("c", AskItems(RUN, TICKET, image.digest, (0,))), 0.0)
    assert isinstance(sent, SendBody)
    assert dropped(donor, 2, 1) == [state(1)]
    assert dropped(donor, 3, MOST) == [state(2), state(0)]
    donor.handle(MeanReady(state(0), image), 0.0)
    assert offered(donor, ask) == (), "the mean is gone"


# ---- what to try first ----


LIMIT = offer_of(7).image.size


def query(circle: str = "", patient: bool = False) -> UpdateQuery:
    state = offer_of(7).state
    wish = Wish(0, LIMIT, state, frozenset(circle), patient=patient)
    return UpdateQuery(Request(RUN, SPEC.hash, TICKET, wish))


def seen(*peers: str, patient: bool = False) -> UpdateQuery:
    missed = query(patient=patient)
    missed.see(peers, 0.0)
    return missed


def test_those_by_whom_one_knows_the_state_come_before_any_number_of_strangers() -> None:
    missed = query("ab")
    missed.see(tuple("axyz"), 0.0)
    for stranger in "xyz":
        missed.hear(stranger, answer(9, offer_of(7, kind=1)), 0.1)
    assert missed.agreement(0.1) is None
    missed.hear("a", answer(9, offer_of(7)), 0.2)
    agreement = missed.agreement(0.2)
    assert agreement is not None
    assert agreement.donors == ("a",)


def test_who_offers_what_nobody_asked_for_offers_nothing() -> None:
    missed = seen("a")
    missed.hear("a", answer(9, offer_of(6)), 0.1)
    assert missed.agreement(0.1) is None
    assert missed.hopeless(0.1)


def test_who_offers_one_has_not_said_that_there_is_none() -> None:
    missed = seen("a", "b", "c", "x", "y")
    missed.hear("a", answer(7), 0.1)
    missed.hear("b", answer(7), 0.1)
    missed.hear("x", answer(9, offer_of(7)), 0.1)
    missed.hear("y", answer(9, offer_of(7)), 0.1)
    assert missed.unheard == 3
    missed.hear("c", answer(7), 0.2)
    missed.bar("x", "chunk 1 has not the digest it should have")
    missed.forget("y")
    assert missed.unheard == 1


def test_one_that_is_patient_waits_for_those_who_are_not_as_far() -> None:
    missed = seen("a", "b", patient=True)
    missed.hear("a", answer(7), 0.1)
    missed.hear("b", answer(6), 0.1)
    assert missed.behind == 1
    assert not missed.hopeless(100.0)
    missed.hear("b", answer(7), 0.1)
    assert missed.hopeless(0.1)


def test_nobody_waits_for_a_peer_whose_trainer_has_left() -> None:
    missed = seen("a", "b", patient=True)
    missed.hear("a", answer(7), 0.1)
    missed.hear("b", Answer(RUN, TICKET, 3, left=True), 0.1)
    assert (missed.behind, missed.unheard) == (0, 0)
    assert missed.hopeless(0.1)


def test_a_record_that_nobody_answers_for_holds_up_no_question() -> None:
    missed = query("a")
    missed.see(("a", "ghost"), 0.0)
    assert not missed.hopeless(0.1)
    missed.hear("a", answer(7), 0.1)
    assert missed.hopeless(0.1)
    assert missed.unheard == 1


@pytest.mark.parametrize("circle", ["", "b"])
def test_where_nobody_of_the_circle_is_there_all_are_given_time(circle: str) -> None:
    missed = query(circle)
    missed.see(("a", "stranger"), 0.0)
    missed.hear("a", answer(7), 0.1)
    assert not missed.hopeless(LONE_SECONDS - 0.1)
    assert missed.hopeless(LONE_SECONDS)


def test_nobody_is_nobody() -> None:
    assert seen().hopeless(0.0) == "no other peer of this run is known"
    missed = seen("a")
    assert not missed.hopeless(0.1)
    missed.forget("a")
    assert missed.hopeless(0.1) == "none of 1 peer has answered"


def test_the_donors_say_when_the_round_closed_and_their_median_counts() -> None:
    missed = query("abc")
    missed.see(tuple("abcx"), 10.0)
    for peer, age, heard in (("a", 3.0, 10.5), ("b", 3.25, 10.75), ("c", 9000.0, 10.75)):
        missed.hear(peer, Answer(RUN, TICKET, 9, (), (offer_of(7),), age=age), heard)
    missed.hear("x", Answer(RUN, TICKET, 9, (), (offer_of(7, kind=1),), age=0.0), 10.75)
    agreement = missed.agreement(11.0)
    assert agreement is not None
    assert agreement.closed == 7.5


async def test_a_mean_comes_with_the_seconds_since_its_group_closed(cluster: Cluster) -> None:
    await cluster.add("a", "b", "c", spec=SPEC)
    await rounds(cluster, "abc", BEFORE, SPEC)
    (late,) = await cluster.add("d", spec=SPEC)
    before = asyncio.get_running_loop().time()
    got = await late.fetch(Wish(after=BEFORE, circle=frozenset("abc")), 20.0, room)
    assert got.ok, got.reason
    assert got.age >= asyncio.get_running_loop().time() - before


# ---- who is still at it ----


def test_a_donor_in_that_very_round_answers_when_it_has_ended() -> None:
    donor, before, image = Server(), offer_of(7).state, offer_of(7).image
    asked = AskReceived("new", Ask(RUN, TICKET, "5" * 64, 0, (), before))
    donor.handle(RoundBegan(before), 0.0)
    assert donor.handle(asked, 0.1) == []
    assert donor.handle(EpochReached(7), 0.2) == []
    assert donor.handle(MeanKept(before, 100, MOST), 0.3) == [MakeImage(before)]
    assert donor.handle(RoundOver(), 0.4) == []
    offered = donor.handle(MeanReady(before, image), 0.5)
    assert offered == [Send("new", Answer(RUN, TICKET, 7, (), (Offer(before, image),), age=0.5))]
    (again,) = donor.handle(EpochReached(8), 2.0)
    assert again == Send("new", Answer(RUN, TICKET, 8, (), (Offer(before, image),), age=2.0))


def test_or_that_nothing_came_of_it() -> None:
    donor, before = Server(), offer_of(7).state
    donor.handle(EpochReached(7), 0.0)
    donor.handle(RoundBegan(before), 0.0)
    assert donor.handle(AskReceived("new", Ask(RUN, TICKET, "5" * 64, 0, (), before)), 0.1) == []
    assert donor.handle(RoundOver(), 0.4) == [Send("new", Answer(RUN, TICKET, 7, (), ()))]
