"""A newcomer's parts of a transfer: messages, images, who is believed, who is asked for what."""

from __future__ import annotations

import itertools
from random import Random
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.replication import answers, messages, snapshot_quorum
from equipoise.averaging.replication.answers import Request, Wish
from equipoise.averaging.replication.chunks import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    LONG_SECONDS,
    MAX_IMAGE_BYTES,
    MAX_REST_SECONDS,
    ChunkScheduler,
    Image,
    ImageId,
    Source,
    is_chunk,
)
from equipoise.averaging.replication.client import Fetch
from equipoise.averaging.replication.messages import (
    Ask,
    AskItems,
    Finished,
    Item,
    Offer,
    Refusal,
)
from equipoise.averaging.replication.transfer_events import (
    Allocate,
    AnswerReceived,
    FetchEvent,
    Finish,
    MemoryReady,
    PeerLost,
    PeersSeen,
    Send,
    Woke,
)
from equipoise.averaging.state import MAX_EPOCH, StateId
from equipoise.averaging.timing import STALL_SECONDS
from fakes.transfer import RUN, SPEC, TICKET, answer, ask, item_came, offer_of

# ---- messages ----


@pytest.mark.parametrize(
    "message",
    [
        ask(3, (4, 5)),
        answer(7, offer_of(7), noted=(8,)),
        answer(None),
        Refusal(RUN, TICKET, "no"),
        AskItems(RUN, TICKET, b"d" * 32, (0, 7)),
        Item(RUN, TICKET, b"d" * 32, 7),
        Finished(RUN, TICKET),
    ],
)
def test_messages_come_back_as_they_were(message: messages.TransferMessage) -> None:
    assert messages.decode(messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Ask("", TICKET, SPEC, 0),
        Ask(RUN, b"short", SPEC, 0),
        Ask(RUN, TICKET, "not a hash", 0),
        Ask(RUN, TICKET, SPEC, -1),
        Ask(RUN, TICKET, SPEC, MAX_EPOCH + 1),
        Ask(RUN, TICKET, SPEC, 0, (1, 2, 3)),
        answer(1, offer_of(1), offer_of(2), offer_of(3)),
        AskItems(RUN, TICKET, b"d" * 31, (0,)),
        AskItems(RUN, TICKET, b"d" * 32, ()),
        AskItems(RUN, TICKET, b"d" * 32, tuple(range(17))),
        AskItems(RUN, TICKET, b"d" * 32, (1 << 40,)),
        answer(1, Offer(StateId(1, "1" * 64), ImageId(b"d" * 32, 0))),
        answer(1, Offer(StateId(1, "1" * 64), ImageId(b"d" * 32, MAX_IMAGE_BYTES + 1))),
        Refusal(RUN, TICKET, "\x1b[2J"),
    ],
)
def test_messages_out_of_bounds_are_refused(message: messages.TransferMessage) -> None:
    with pytest.raises(FrameRefused, match="expected a message of a transfer"):
        messages.decode(messages.encode(message))


def test_barred_peers_are_asked_for_nothing() -> None:
    fetch = Fetch(Request(RUN, SPEC, TICKET, Wish(0, 100, barred=frozenset("b"))), 0.0, 60.0)
    asked = [one.to for one in fetch.handle(PeersSeen(("a", "b", "c")), 0.0) if isinstance(one, Send)]
    assert asked == ["a", "c"]
    fetch = Fetch(Request(RUN, SPEC, TICKET, Wish(0, 100, barred=frozenset("b"))), 0.0, 60.0)
    (end,) = [one for one in fetch.handle(PeersSeen(("b",)), 0.0) if isinstance(one, Finish)]
    assert "b: its last image did not fit" in end.outcome.reason


# ---- images ----


@given(st.integers(1, 3 * CHUNK_BYTES + 5), st.integers(0, 2**32))
def test_chunks_make_up_the_image(size: int, seed: int) -> None:
    name = ImageId(b"d" * 32, size)
    spans = [name.span(chunk) for chunk in range(1, name.chunks + 1)]
    assert spans[0].start == 0
    assert spans[-1].stop == size
    assert all(before.stop == after.start for before, after in itertools.pairwise(spans))
    assert sum(name.length(chunk) for chunk in range(1, name.chunks + 1)) == size
    assert name.length(0) == name.chunks * DIGEST_BYTES


def test_no_byte_of_an_image_its_size_or_its_list_can_be_changed() -> None:
    image = bytearray(Random(1).randbytes(2 * CHUNK_BYTES + 100))
    name, _, digests = Image.of(memoryview(image))
    assert name.genuine(digests)
    assert all(is_chunk(memoryview(image)[name.span(i)], digests, i) for i in (1, 2, 3))
    assert not is_chunk(memoryview(image)[name.span(1)], digests, 2)
    assert not name.genuine(digests[:-1] + b"x")
    assert not name.genuine(digests[:-32])
    assert not ImageId(name.digest, name.size + 1).genuine(digests)
    image[CHUNK_BYTES] ^= 1
    assert not is_chunk(memoryview(image)[name.span(2)], digests, 2)
    assert Image.of(memoryview(image)).digests != digests


# ---- whom a newcomer believes ----


M = TypeVar("M")


class Newcomer:
    """A fetch machine with a clock, and what it said."""

    def __init__(self, *peers: str, at_least: int = 5, limit: int = 10 * CHUNK_BYTES) -> None:
        self.now = 0.0
        self.machine = Fetch(Request(RUN, SPEC, TICKET, Wish(at_least, limit)), 0.0, 60.0)
        self.said: list[tuple[str, messages.TransferMessage]] = []
        self.others: list[object] = []
        self.tell(PeersSeen(peers))

    def tell(self, event: FetchEvent) -> None:
        for action in self.machine.handle(event, self.now):
            if isinstance(action, Send):
                self.said.append((action.to, action.message))
            else:
                self.others.append(action)

    def hear(self, peer: str, message: messages.ToNewcomer) -> None:
        self.tell(AnswerReceived(peer, message))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.machine.deadline <= until:
            self.now = max(self.machine.deadline, self.now)
            self.tell(Woke())
        self.now = until

    def asked(self, kind: type[M]) -> list[tuple[str, M]]:
        said, self.said = self.said, []
        return [(peer, message) for peer, message in said if isinstance(message, kind)]

    @property
    def allocated(self) -> bool:
        return any(isinstance(one, Allocate) for one in self.others)

    def begin(self, offer: Offer, *peers: str) -> None:
        for peer in peers:
            self.hear(peer, answer(offer.state.epoch, offer))
        assert self.allocated
        ((peer, message),) = self.asked(AskItems)
        assert message.items == (0,)
        self.tell(MemoryReady(offer.image.size))
        self.tell(item_came(peer, offer, 0))


def test_most_are_believed_at_once() -> None:
    newcomer = Newcomer("a", "b", "c")
    newcomer.hear("a", answer(5, offer_of(5)))
    assert not newcomer.allocated
    newcomer.said.clear()
    newcomer.hear("b", answer(5, offer_of(5)))
    assert newcomer.allocated
    renewed = [(peer, message.wanted) for peer, message in newcomer.asked(Ask)]
    assert renewed == [(peer, ()) for peer in "abc"], "donors may forget what was wished for before"


def test_who_answers_first_does_not_become_all_who_count() -> None:
    asked = snapshot_quorum.SnapshotQuorum(7)
    asked.see(tuple("abcdenvwxyz"), 0.0)
    asked.hear("e", answer(7), 0.1)
    asked.hear("n", answer(None), 0.1)
    asked.forget("v")
    for peer in "awxyz":
        assert asked.agreement(0.1) is None
        asked.hear(peer, answer(7, offer_of(7)), 0.1)
    agreement = asked.agreement(0.1)
    assert agreement is None
    asked.hear("b", answer(7, offer_of(7)), 0.1)
    agreement = asked.agreement(0.1)
    assert agreement is not None
    assert agreement.donors == tuple("abwxyz")
    assert set(agreement.voters) == set("abcdewxyz")


def test_the_only_one_is_believed_once_the_others_were_given_time() -> None:
    alone = Newcomer("a")
    alone.hear("a", answer(5, offer_of(5)))
    assert alone.allocated
    first = Newcomer("a", "b")
    first.hear("a", answer(5, offer_of(5)))
    first.wait(answers.LONE_SECONDS - 0.01)
    assert not first.allocated
    first.wait(0.02)
    assert first.allocated


def test_who_has_no_state_or_cannot_be_reached_is_not_waited_for() -> None:
    newcomer = Newcomer("a", "b", "c")
    newcomer.hear("a", answer(5, offer_of(5)))
    newcomer.hear("b", answer(None))
    assert not newcomer.allocated
    newcomer.tell(PeerLost("c", "refused"))
    assert newcomer.allocated


def test_other_newcomers_have_no_say() -> None:
    newcomer = Newcomer("veteran", "new", "newer", at_least=908)
    newcomer.hear("new", answer(0))
    newcomer.hear("newer", answer(None))
    newcomer.hear("veteran", answer(907))
    assert newcomer.asked(Ask)[-1][1].wanted == (908,)
    newcomer.hear("veteran", answer(908, offer_of(908)))
    assert newcomer.allocated


def test_of_two_who_differ_neither_is_believed() -> None:
    newcomer = Newcomer("a", "b")
    newcomer.hear("a", answer(5, offer_of(5)))
    newcomer.hear("b", answer(5, offer_of(5, kind=1)))
    newcomer.wait(61.0)
    assert not newcomer.allocated
    (end,) = newcomer.others
    assert isinstance(end, Finish)
    assert not end.outcome.ok
    assert "do not agree" in end.outcome.reason


def test_where_steps_take_minutes_one_that_boasts_of_later_epochs_is_not_believed() -> None:
    newcomer = Newcomer("a", "b", "liar")
    for peer in ("a", "b"):
        newcomer.hear(peer, answer(4, noted=(5,)))
    newcomer.hear("liar", answer(9, offer_of(9)))
    newcomer.wait(snapshot_quorum.STUCK_SECONDS + 20.0)
    assert not newcomer.allocated


def test_two_that_make_up_an_epoch_to_come_are_not_believed() -> None:
    newcomer = Newcomer("a", "b", "c", "liar", "lies")
    for peer in ("a", "b", "c"):
        newcomer.hear(peer, answer(4, noted=(5,)))
    for peer in ("liar", "lies"):
        newcomer.hear(peer, answer(9, offer_of(9)))
    newcomer.wait(snapshot_quorum.STUCK_SECONDS - 1.0)
    assert not newcomer.allocated
    for peer in ("a", "b", "c"):
        newcomer.hear(peer, answer(10))
    assert newcomer.allocated


def test_an_answer_to_an_earlier_download_counts_for_nothing() -> None:
    newcomer = Newcomer("a")
    newcomer.hear("a", answer(5, offer_of(5), ticket=b"replayed"))
    newcomer.wait(10.0)
    assert not newcomer.allocated


def test_a_stranger_counts_for_nothing() -> None:
    newcomer = Newcomer("a", "b")
    for peer in ("x", "y", "z"):
        newcomer.hear(peer, answer(5, offer_of(5)))
    assert not newcomer.allocated


def test_donors_are_asked_for_the_epoch_after_theirs_and_then_for_later_ones() -> None:
    newcomer = Newcomer("a", "b", "liar")
    for peer, epoch in (("a", 7), ("b", 7), ("liar", 900)):
        newcomer.hear(peer, answer(epoch))
    assert {message.wanted for _, message in newcomer.asked(Ask)[-2:]} == {(8,)}
    newcomer.tell(PeerLost("liar", "reset"))
    margins = []
    epoch = 9
    for _ in range(6):
        for peer in ("a", "b"):
            newcomer.hear(peer, answer(epoch))
        (wanted,) = {message.wanted for _, message in newcomer.asked(Ask)[-2:]}
        margins.append(wanted[0] - epoch)
        epoch = wanted[0] + 1
    assert margins == [2, 4, 8, 16, 32, 64]


def test_where_steps_are_slow_the_present_epoch_is_asked_for_too() -> None:
    newcomer = Newcomer("a", at_least=5)
    newcomer.hear("a", answer(7, noted=()))
    newcomer.hear("a", answer(7, noted=(8,)))
    newcomer.wait(snapshot_quorum.SLOW_SECONDS + 1.5)
    assert newcomer.asked(Ask)[-1][1].wanted == (8, 7)


def test_more_than_the_limit_is_refused_before_any_memory_is_asked_for() -> None:
    newcomer = Newcomer("a", limit=3 * CHUNK_BYTES - 1)
    newcomer.hear("a", answer(5, offer_of(5)))
    (end,) = newcomer.others
    assert isinstance(end, Finish)
    assert not end.outcome.ok
    assert f"at most {3 * CHUNK_BYTES - 1} bytes" in end.outcome.reason


def test_only_a_believed_peer_has_a_vote_while_it_is_there_and_all_that_offer_the_same_are_donors() -> None:
    poll = snapshot_quorum.SnapshotQuorum(5, frozenset({"a"}))
    poll.see(tuple("abcde"), 0.0)
    for peer in "bcd":
        poll.hear(peer, answer(5, offer_of(5, 1)), 0.1)
    assert poll.agreement(0.1) is None
    poll.hear("a", answer(5, offer_of(5, 0)), 0.2)
    poll.hear("e", answer(5, offer_of(5, 0)), 0.2)
    agreed = poll.agreement(0.2)
    assert agreed is not None
    assert agreed.donors == ("a", "e")
    poll.hear("a", msgspec.structs.replace(answer(5), left=True), 0.3)
    agreed = poll.agreement(0.3)
    assert agreed is not None
    assert agreed.donors == tuple("bcd"), "the trainer of the believed peer has left without a snapshot"


def test_donors_whose_snapshots_differ_are_asked_less_and_less_often() -> None:
    newcomer, wishes = Newcomer("a", "b"), []
    epoch = 5
    for _ in range(60):
        for kind, peer in enumerate(("a", "b")):
            newcomer.hear(peer, answer(epoch, offer_of(epoch, kind)))
        if any(message.wanted and message.wanted[0] > epoch for _, message in newcomer.asked(Ask)):
            wishes.append(newcomer.now)
            epoch = newcomer.machine._poll.wanted[0]
        newcomer.wait(0.5)
    gaps = [after - before for before, after in itertools.pairwise(wishes)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 4 * gaps[0]


# ---- a download ----


def test_a_donor_that_stalls_rests_twice_as_long_each_time_until_it_delivers() -> None:
    source, rests = Source(), []
    for now in (0.0, 100.0, 200.0, 300.0):
        source.ask(1, now)
        assert source.stall(now) == [1]
        rests.append(source.rests_until - now)
    assert rests == [STALL_SECONDS, 2 * STALL_SECONDS, 4 * STALL_SECONDS, MAX_REST_SECONDS][: len(rests)]
    source.ask(1, 400.0)
    source.deliver(1, 400.1)
    source.ask(2, 401.0)
    source.stall(401.0)
    assert source.rests_until == 401.0 + STALL_SECONDS


def test_a_slow_donor_is_asked_for_half_as_many_chunks() -> None:
    source = Source()
    for chunk in range(4):
        source.ask(chunk, 0.0)
        source.deliver(chunk, 0.1)
    wide = source.room(1.0)
    source.ask(9, 1.0)
    source.deliver(9, 1.0 + 2 * LONG_SECONDS)
    assert source.room(9.0) == wide // 2


def test_all_donors_are_asked_and_told_when_it_is_over() -> None:
    newcomer = Newcomer("a", "b")
    offer = offer_of(5, chunks=4)
    newcomer.begin(offer, "a", "b")
    asked = newcomer.asked(AskItems)
    assert sorted(chunk for _, message in asked for chunk in message.items) == [1, 2, 3, 4]
    assert {peer for peer, _ in asked} == {"a", "b"}
    for peer, message in asked:
        for chunk in message.items:
            newcomer.tell(item_came(peer, offer, chunk))
    end = newcomer.others[-1]
    assert isinstance(end, Finish)
    assert end.outcome.ok
    assert end.outcome.sources == {"a": 2 * CHUNK_BYTES, "b": 2 * CHUNK_BYTES}
    assert {peer for peer, _ in newcomer.asked(Finished)} == {"a", "b"}
    assert newcomer.machine.deadline == float("inf")


def test_a_wrong_chunk_bars_its_donor_for_good_and_others_are_asked_at_once() -> None:
    newcomer = Newcomer("a", "b")
    offer = offer_of(5, chunks=4)
    newcomer.begin(offer, "a", "b")
    own = {peer: message.items for peer, message in newcomer.asked(AskItems)}
    for chunk in own["b"]:
        newcomer.tell(item_came("b", offer, chunk))
    assert not newcomer.asked(AskItems)
    newcomer.tell(item_came("a", offer, own["a"][0], False))
    newcomer.hear("a", answer(5, offer))
    assert {chunk for peer, message in newcomer.asked(AskItems) for chunk in message.items} == set(own["a"])
    assert not newcomer.machine.expects("a", Item(RUN, TICKET, offer.image.digest, own["a"][1]))


def test_a_wrong_list_of_digests_bars_its_donor_and_the_next_is_asked_at_once() -> None:
    newcomer = Newcomer("a", "b", "c")
    offer = offer_of(5)
    for peer in ("a", "b", "c"):
        newcomer.hear(peer, answer(5, offer))
    ((first, _),) = newcomer.asked(AskItems)
    newcomer.tell(item_came(first, offer, 0, False))
    ((second, again),) = newcomer.asked(AskItems)
    assert second != first
    assert again.items == (0,)
    newcomer.wait(STALL_SECONDS + 0.01)
    ((third, _),) = newcomer.asked(AskItems)
    assert third not in (first, second)


def test_donors_that_keep_the_digests_back_are_asked_one_after_another_and_late_ones_are_welcome() -> None:
    newcomer = Newcomer("a", "b", "c")
    offer = offer_of(5)
    for peer in ("a", "b", "c"):
        newcomer.hear(peer, answer(5, offer))
    newcomer.tell(MemoryReady(offer.image.size))
    asked = []
    for _ in range(3):
        ((peer, _),) = newcomer.asked(AskItems)
        asked.append(peer)
        newcomer.wait(STALL_SECONDS + 0.01)
    assert sorted(asked) == ["a", "b", "c"]
    newcomer.tell(item_came(asked[0], offer, 0))
    assert {item for _, message in newcomer.asked(AskItems) for item in message.items} >= {1, 2, 3}


def test_what_is_left_of_a_download_goes_on_when_a_donor_comes_back() -> None:
    newcomer = Newcomer("a")
    offer = offer_of(5, chunks=3)
    newcomer.begin(offer, "a")
    newcomer.tell(item_came("a", offer, 1))
    newcomer.tell(PeerLost("a", "reset"))
    assert newcomer.asked(Ask), "it asks anew at once"
    newcomer.hear("a", answer(6, offer))
    asked = [chunk for _, message in newcomer.asked(AskItems) for chunk in message.items]
    assert sorted(asked) == [2, 3]
    assert sum(isinstance(one, Allocate) for one in newcomer.others) == 1


def test_what_nobody_asked_for_is_not_expected() -> None:
    newcomer = Newcomer("a", "b")
    offer = offer_of(5, chunks=8)
    newcomer.begin(offer, "a", "b")
    asked = {(peer, chunk) for peer, message in newcomer.asked(AskItems) for chunk in message.items}
    for peer in ("a", "b", "x"):
        for chunk in range(1, 9):
            expected = newcomer.machine.expects(peer, Item(RUN, TICKET, offer.image.digest, chunk))
            assert expected == ((peer, chunk) in asked)
    assert not newcomer.machine.expects("a", Item(RUN, TICKET, b"x" * 32, 1))
    assert not newcomer.machine.expects("a", Item(RUN, TICKET, offer.image.digest, 0))


@given(st.integers(0, 2**32))
def test_whatever_donors_do_every_chunk_is_taken_once(seed: int) -> None:
    random, now = Random(seed), 0.0
    chunks = random.randint(1, 30)
    sources, taken = ChunkScheduler(range(chunks)), []
    for peer in "abc":
        sources.add(peer)
    asked: list[tuple[str, int]] = []
    while sources.left:
        now += random.random()
        asked += [(peer, chunk) for peer, some in sources.requests(now) for chunk in some]
        sources.stalled(now)
        if random.random() < 0.1:
            back = random.choice("abc")
            if sources.remove(back):
                sources.add(back)
        if len(sources.donors) > 1 and random.random() < 0.02:
            sources.remove(random.choice(sorted(sources.donors)))
        if asked and random.random() < 0.7:
            peer, chunk = asked.pop(random.randrange(len(asked)))
            if sources.expects(peer, chunk):
                sources.receive(peer, chunk, now)
                taken.append(chunk)
        assert now < 10_000, "it goes on"
    assert sorted(taken) == list(range(chunks))
    assert sum(sources.delivered.values()) == chunks
