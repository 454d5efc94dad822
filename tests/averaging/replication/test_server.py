"""A donor's parts of a transfer: what it holds, what it asks of its trainer, and whom it serves when."""

from __future__ import annotations

import pytest

from equipoise.averaging.replication import messages, upload_queue
from equipoise.averaging.replication import server as donors
from equipoise.averaging.replication.messages import (
    Answer,
    AskItems,
    Finished,
    Item,
    Offer,
    Refusal,
)
from equipoise.averaging.replication.server import Server
from equipoise.averaging.replication.transfer_events import (
    AskReceived,
    DonorEvent,
    EpochReached,
    FetchChanged,
    Forget,
    Release,
    Send,
    SendBody,
    SnapshotReady,
    SnapshotTaken,
    Woke,
)
from equipoise.averaging.replication.upload_queue import Serving
from equipoise.averaging.timing import ASKER_SECONDS
from fakes.transfer import RUN, TICKET, answer, ask, offer_of

# ---- donors ----


class Giver:
    """A donor machine with a clock, and what it said."""

    def __init__(self, epoch: int | None = 6) -> None:
        self.now = 0.0
        self.machine = Server()
        if epoch is not None:
            self.tell(EpochReached(epoch))

    def tell(self, event: DonorEvent) -> list[object]:
        actions = self.machine.handle(event, self.now)
        return [action.message if isinstance(action, Send | SendBody) else action for action in actions]

    def ask(self, message: messages.ToDonor, peer: str = "new") -> list[object]:
        return self.tell(AskReceived(peer, message))

    def offer(self, offer: Offer) -> list[object]:
        self.tell(SnapshotTaken(offer.state))
        return self.tell(SnapshotReady(offer.state, offer.image))


def test_a_wish_is_shown_to_the_trainer_until_it_is_fulfilled() -> None:
    giver = Giver(epoch=6)
    assert giver.ask(ask(7, wanted=(7,))) == [answer(6, noted=(7,))]
    assert giver.machine.wanted == 7
    giver.tell(EpochReached(7))
    assert giver.machine.wanted == 7
    assert giver.offer(offer_of(7)) == [answer(7, offer_of(7))]
    assert giver.machine.wanted is None


def test_one_that_fetches_itself_has_no_state_to_speak_of() -> None:
    giver = Giver(epoch=6)
    giver.tell(FetchChanged(True))
    assert giver.ask(ask(7)) == [answer(None)]
    giver.tell(FetchChanged(False))
    assert giver.ask(ask(7)) == [answer(6)]


def test_a_wish_that_comes_too_late_is_told_at_once() -> None:
    giver = Giver(epoch=9)
    assert giver.ask(ask(7, wanted=(8,))) == [answer(9)]
    assert giver.machine.wanted is None


def test_a_wish_that_the_trainer_misses_is_told() -> None:
    giver = Giver(epoch=6)
    giver.ask(ask(7, wanted=(7,)))
    assert giver.tell(EpochReached(8)) == [answer(8)]
    assert giver.machine.wanted is None


def test_what_is_downloaded_is_held_beside_the_newest_and_no_more() -> None:
    giver = Giver()
    giver.offer(offer_of(1))
    giver.ask(ask(0))
    giver.ask(AskItems(RUN, TICKET, offer_of(1).image.digest, (0,)))
    giver.offer(offer_of(2))
    assert giver.offer(offer_of(3)) == [Release(offer_of(2).image)]
    assert not any(
        isinstance(one, Refusal) for one in giver.ask(AskItems(RUN, TICKET, offer_of(1).image.digest, (1,)))
    )
    assert giver.ask(Finished(RUN, TICKET)) == [Forget("new"), Release(offer_of(1).image)]


def test_two_who_never_finish_do_not_keep_both_places() -> None:
    giver = Giver()
    for epoch, peer in ((1, "slow"), (2, "slower")):
        giver.offer(offer_of(epoch))
        giver.ask(ask(0), peer)
        giver.ask(AskItems(RUN, TICKET, offer_of(epoch).image.digest, (0,)), peer)
    (said,) = giver.ask(ask(7, wanted=(7,)))
    assert isinstance(said, Answer)
    assert said.noted == (), "there is no room for another snapshot"
    assert giver.machine.wanted is None
    until = giver.now + donors.HOLD_SECONDS + donors.HOLD_SECONDS_PER_CHUNK * offer_of(1).image.chunks
    while giver.now < until:
        giver.now += ASKER_SECONDS / 2
        for peer in ("slow", "slower"):
            giver.ask(ask(0), peer)
    giver.ask(ask(7, wanted=(7,)))
    assert giver.machine.wanted == 7


def test_who_is_silent_is_forgotten_and_what_was_held_for_it_goes() -> None:
    giver = Giver()
    giver.offer(offer_of(1))
    giver.ask(ask(0))
    giver.ask(AskItems(RUN, TICKET, offer_of(1).image.digest, (0,)))
    giver.offer(offer_of(2))
    giver.now += ASKER_SECONDS
    assert giver.tell(Woke()) == [Forget("new"), Release(offer_of(1).image)]


def test_nothing_waits_for_whom_is_forgotten() -> None:
    giver = Giver()
    giver.offer(offer_of(1, chunks=9))
    for index in range(5):
        giver.ask(ask(0), f"new{index}")
        giver.ask(
            AskItems(RUN, TICKET, offer_of(1, chunks=9).image.digest, tuple(range(1, 10))), f"new{index}"
        )
    giver.now += ASKER_SECONDS
    assert giver.tell(Woke()) == [Forget(f"new{index}") for index in range(5)]
    assert giver.machine.standing == ""
    assert giver.machine.deadline == float("inf")


def test_nothing_is_served_to_whom_has_not_asked() -> None:
    giver = Giver()
    giver.offer(offer_of(1))
    digest = offer_of(1).image.digest
    for message in (AskItems(RUN, TICKET, digest, (0,)), AskItems(RUN, TICKET, digest, (1,))):
        (gone,) = giver.ask(message)
        assert isinstance(gone, Refusal)
    giver.ask(ask(0))
    (gone,) = giver.ask(AskItems(RUN, b"another.", digest, (0,)))
    assert isinstance(gone, Refusal)
    (gone,) = giver.ask(AskItems(RUN, TICKET, b"x" * 32, (0,)))
    assert isinstance(gone, Refusal)


def test_no_more_newcomers_than_a_group_has_members_are_served() -> None:
    giver = Giver()
    for index in range(donors.MAX_ASKERS):
        assert isinstance(giver.ask(ask(), f"new{index}")[0], Answer)
    refusal, forget = giver.ask(ask(), "one more")
    assert forget == Forget("one more")
    assert isinstance(refusal, Refusal)
    assert "served already" in refusal.reason


def test_trainers_are_not_asked_for_snapshots_without_end() -> None:
    giver = Giver(epoch=0)
    for epoch in range(1, donors.MAX_SNAPSHOTS + 1):
        giver.ask(ask(epoch, wanted=(epoch,)), f"new{epoch}")
        assert giver.machine.wanted == epoch
        giver.offer(offer_of(epoch))
    giver.ask(ask(50, wanted=(50,)))
    assert giver.machine.wanted is None
    giver.now += donors.SNAPSHOTS_SECONDS
    giver.ask(ask(50, wanted=(50,)))
    assert giver.machine.wanted == 50


# ---- in which order they are served ----


def chunk(index: int) -> Item:
    return Item(RUN, TICKET, b"d" * 32, index)


def test_newcomers_take_turns() -> None:
    line = Serving()
    line.add("a", [chunk(i) for i in range(3)])
    line.add("b", [chunk(i) for i in range(3)])
    order = []
    while (served := line.next(0.0)) is not None:
        order.append(served[0])
        line.sent(served[0], False, 0.0)
    assert order in (["a", "b"] * 3, ["b", "a"] * 3)


def test_during_rounds_a_donor_pauses_after_each_body() -> None:
    line = Serving()
    line.add("a", [chunk(i) for i in range(4)])
    assert line.next(0.0) is not None
    line.sent("a", True, 0.1)
    assert line.next(0.1) is None
    assert line.deadline(0.1) == pytest.approx(0.1 + upload_queue.PAUSE_FACTOR * 0.1)
    assert line.next(0.41) is not None
    assert line.next(0.41) is None, "one at a time"
    assert line.deadline(0.41) == pytest.approx(0.41 + upload_queue.LOOK_SECONDS), (
        "the round may be over by then"
    )
    line.busy = False
    assert line.next(0.5) is not None


@pytest.mark.parametrize("took", [0.02, 0.5, 3.0, 15.0])
def test_rounds_keep_three_quarters_of_a_link_however_slow_it_is(took: float) -> None:
    line, now, sending, ends = Serving(), 0.0, 0.0, None
    line.busy = True
    for peer in ("a", "b"):
        line.add(peer, [chunk(i) for i in range(30)])
    while now < 100 * took:
        if ends is not None and now >= ends[1]:
            line.sent(ends[0], True, now)
            ends = None
        if (served := line.next(now)) is not None:
            assert ends is None, "one at a time"
            ends, sending = (served[0], now + took), sending + took
        now = min(line.deadline(now), ends[1] if ends else float("inf"), now + 1.0)
    assert 0.2 < sending / now < 0.27


def test_one_with_a_slow_link_does_not_slow_down_another() -> None:
    line, now, ends, sent = Serving(), 0.0, None, {"slow": 0, "fast": 0}
    line.busy = True
    while now < 300.0:
        for peer in sent:
            line.add(peer, [chunk(i) for i in range(30)])
        if ends is not None and now >= ends[1]:
            line.sent(ends[0], True, now)
            sent[ends[0]] += 1
            ends = None
        if (served := line.next(now)) is not None:
            ends = served[0], now + {"slow": 9.0, "fast": 0.05}[served[0]]
        now = min(line.deadline(now), ends[1] if ends else float("inf"))
    assert sent["slow"] >= 5
    assert sent["fast"] > 600, "of 1500 if it were alone"


def test_one_that_does_not_read_takes_nobody_elses_turn_for_long() -> None:
    line = Serving()
    line.add("stopped", [chunk(i) for i in range(4)])
    assert line.next(0.0) == ("stopped", chunk(0))
    assert line.next(0.0) == ("stopped", chunk(1))
    line.add("b", [chunk(0)])
    assert line.next(0.0) is None
    assert line.next(line.deadline(0.0)) == ("b", chunk(0))


def test_one_can_ask_for_no_more_than_fits_the_queue() -> None:
    line = Serving()
    for _ in range(10):
        line.add("a", [chunk(i) for i in range(100)])
    count = 0
    while (served := line.next(0.0)) is not None:
        count += 1
        line.sent(served[0], False, 0.0)
    assert count == upload_queue.MAX_QUEUED
