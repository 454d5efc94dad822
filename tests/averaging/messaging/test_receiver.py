"""What a receiver takes of senders that break the rules."""

from __future__ import annotations

import math

from equipoise.averaging.messaging.messages import MAX_WAITING, MAX_WAITING_BYTES, Part
from equipoise.averaging.messaging.receiver import (
    LEAST_RATE,
    MAX_SENDERS,
    STALL_SECONDS,
    Deliver,
    Discard,
    Mailbox,
    Opened,
    PartBegan,
    PartTaken,
    Past,
    PeerLost,
    Receiver,
    Tell,
    Woke,
)

A = b"a" * 8


def opened(*peers: str) -> Receiver:
    receiver = Receiver(Mailbox(b"r" * 8))
    for peer in peers:
        receiver.handle(Opened(peer, A), 0.0)
    return receiver


def part(receiver: Receiver, number: int, size: int = 10, offset: int = 0, peer: str = "a") -> Part:
    turn = receiver.receipt("run", peer).turn
    return Part("run", A, turn, number, "t", size, offset)


def test_parts_count_in_order_once_and_in_their_turn_alone() -> None:
    receiver = opened("a")
    first = part(receiver, 1)
    assert receiver.handle(PartTaken("a", first, 10), 0.0) == [], "it has not begun"
    assert receiver.handle(PartBegan("a", first, False), 0.0) == []
    assert receiver.expects("a", first)
    assert not receiver.expects("a", part(receiver, 1, 11))
    assert not receiver.expects("a", part(receiver, 1, offset=4))
    assert not receiver.expects("b", first)
    receiver.handle(PartTaken("a", first, 4), 0.0)
    assert not receiver.expects("a", first)
    rest = part(receiver, 1, offset=4)
    assert receiver.handle(PartTaken("a", rest, 6), 0.0) == [Deliver("a", first), Tell("a")]
    assert receiver.handle(PartBegan("a", first, False), 0.0) == [], "seen"
    receiver.handle(Opened("a", A), 0.0)
    stale = Part("run", A, 1, 2, "t", 10, 0)
    assert receiver.handle(PartBegan("a", stale, False), 0.0) == []
    assert not receiver.expects("a", stale)


def test_room_is_kept_for_nobody_that_is_gone() -> None:
    receiver = opened("a", "b", "c")
    receiver.handle(PartBegan("a", part(receiver, 1, MAX_WAITING_BYTES), False), 0.0)
    assert receiver.handle(PartBegan("b", part(receiver, 1, 1, peer="b"), True), 0.0) == [Tell("b")]
    assert receiver.handle(PartBegan("c", part(receiver, 1, 1, peer="c"), False), 0.0) == [Tell("c")]
    assert receiver.receipt("run", "b").waits
    actions = receiver.handle(PeerLost("a"), 0.0)
    assert [action for action in actions if isinstance(action, Tell)] == [Tell("a"), Tell("b"), Tell("c")]
    assert receiver.receipt("run", "a").turn == 0
    assert receiver.receipt("run", "b").granted == 1


def test_a_message_that_does_not_grow_gives_its_room_to_those_that_wait() -> None:
    receiver = opened("silent", "b")
    receiver.handle(PartBegan("silent", part(receiver, 1, MAX_WAITING_BYTES, peer="silent"), True), 5.0)
    assert receiver.deadline == math.inf, "nobody waits"
    receiver.handle(PartBegan("b", part(receiver, 1, 7, peer="b"), True), 20.0)
    assert receiver.deadline == 5.0 + STALL_SECONDS
    assert receiver.handle(Woke(), receiver.deadline - 1) == []
    turn = receiver.receipt("run", "silent").turn
    late = part(receiver, 1, MAX_WAITING_BYTES, peer="silent")
    told = receiver.handle(Woke(), receiver.deadline)
    assert told == [Discard("silent"), Tell("silent"), Tell("b")]
    assert receiver.receipt("run", "silent").turn > turn, "it sends the message anew"
    assert receiver.receipt("run", "b").granted == 1
    assert not receiver.expects("silent", late)
    again = part(receiver, 1, MAX_WAITING_BYTES, peer="silent")
    receiver.handle(PartBegan("silent", again, True), 70.0)
    assert receiver.receipt("run", "silent").waits, "behind the others"


def test_a_message_that_grows_slowly_keeps_its_room_but_not_by_trickles() -> None:
    receiver = opened("slow", "b")
    size, now = MAX_WAITING_BYTES, 0.0
    receiver.handle(PartBegan("slow", part(receiver, 1, size, peer="slow"), True), now)
    receiver.handle(PartBegan("b", part(receiver, 1, 7, peer="b"), True), now)
    for step in range(100):
        now += 30.0
        assert receiver.handle(Woke(), now) == []
        piece = part(receiver, 1, size, offset=step * 30 * LEAST_RATE, peer="slow")
        receiver.handle(PartTaken("slow", piece, 30 * LEAST_RATE), now)
        assert receiver.deadline == now + STALL_SECONDS
    for byte in range(2):
        piece = part(receiver, 1, size, offset=3000 * LEAST_RATE + byte, peer="slow")
        receiver.handle(PartTaken("slow", piece, 1), now + 29.0 * (1 + byte))
    assert Discard("slow") in receiver.handle(Woke(), receiver.deadline)


def test_senders_and_what_is_told_of_them_are_bounded() -> None:
    receiver = opened(*map(str, range(MAX_SENDERS + 5)))
    assert len(receiver.senders) == MAX_SENDERS
    assert "0" not in receiver.senders
    past = Past("a", A, 1000, tuple(range(1, MAX_WAITING + 1)))
    receiver = Receiver(Mailbox(b"r" * 8, (past,)))
    receiver.handle(Opened("a", A), 0.0)
    for number in range(1001, 1001 + MAX_WAITING):
        one = part(receiver, number)
        receiver.handle(PartBegan("a", one, False), 0.0)
        receiver.handle(PartTaken("a", one, 10), 0.0)
    assert len(receiver.past("a").missing) == MAX_WAITING
    assert len(receiver.receipt("run", "a").held) == MAX_WAITING
