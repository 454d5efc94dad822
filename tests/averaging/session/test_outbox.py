"""Control before bulk, and rounds in turn, by bytes."""

from __future__ import annotations

import pytest

from equipoise.averaging.session.messages import ENVELOPE_BYTES
from equipoise.averaging.session.outbox import Bulk, Frame, Outbox

FP32, INT8 = 4096, 1040
"""Bytes of a part's values, in proportion."""


def frame(name: bytes, size: int = 4) -> Bulk:
    return lambda: (name, bytes(size))


def take(queue: Outbox) -> Frame | None:
    made = queue.next_frame(None)
    return None if made is None else (made[0][ENVELOPE_BYTES:], made[1])


def taken(queue: Outbox) -> list[bytes]:
    frames = []
    while made := take(queue):
        frames.append(made[0])
    return frames


def test_flows_take_turns_however_much_each_has_queued() -> None:
    queue = Outbox(bytes(8))
    for name in (b"a1", b"a2", b"a3", b"a4"):
        queue.add_bulk(b"a", frame(name))
    for name in (b"b1", b"b2"):
        queue.add_bulk(b"b", frame(name))
    assert taken(queue) == [b"a1", b"b1", b"a2", b"b2", b"a3", b"a4"]
    assert not queue


def test_unwanted_bulk_costs_no_flow_a_turn() -> None:
    queue = Outbox(bytes(8))
    queue.add_bulk(b"a", lambda: None)
    queue.add_bulk(b"a", frame(b"a2"))
    queue.add_bulk(b"b", frame(b"b1"))
    assert taken(queue) == [b"a2", b"b1"]


@pytest.mark.parametrize("queued", [1, 2, 100], ids="{} queued".format)
def test_flows_of_small_and_large_frames_get_equal_bytes(queued: int) -> None:
    queue, sizes, had = Outbox(bytes(8)), {b"fp32": FP32, b"int8": INT8}, {b"fp32": 0, b"int8": 0}
    for name, size in sizes.items():
        for _ in range(queued):
            queue.add_bulk(name, frame(name, size))
    for _ in range(1000):
        made = take(queue)
        assert made is not None
        name, body = made
        had[name] += len(name) + len(body)
        assert abs(had[b"fp32"] - had[b"int8"]) <= FP32 + len(b"fp32")
        queue.add_bulk(name, frame(name, sizes[name]))


def test_a_flow_that_comes_late_or_pauses_catches_up_with_none() -> None:
    queue = Outbox(bytes(8))
    for _ in range(50):
        for name in (b"a", b"b"):
            queue.add_bulk(name, frame(name, 1))
    queue.add_bulk(b"pauses", frame(b"pauses", 1))
    assert (b"pauses", b"\0") in [take(queue) for _ in range(60)]
    for name in (b"pauses", b"late"):
        for _ in range(20):
            queue.add_bulk(name, frame(name, 1))
    order = taken(queue)[:8]
    assert order.count(b"a") >= 2, order
    assert order.count(b"b") >= 2, order


@pytest.mark.parametrize("end", ["dropped", "emptied"])
def test_bytes_of_a_flow_are_forgotten_with_it_and_when_nothing_waits(end: str) -> None:
    queue = Outbox(bytes(8))
    queue.add_bulk(b"a", frame(b"a", 999))
    for _ in range(3):
        queue.add_bulk(b"b", frame(b"b"))
    assert take(queue) == (b"a", bytes(999))
    if end == "dropped":
        queue.drop_bulk(b"a")
    else:
        taken(queue)
        for _ in range(3):
            queue.add_bulk(b"b", frame(b"b"))
    queue.add_bulk(b"a", frame(b"a"))
    assert taken(queue) == [b"b", b"a", b"b", b"b"]


def test_one_flow_or_all_but_some_are_dropped() -> None:
    queue = Outbox(bytes(8))
    queue.control += [(b"a", b"hello"), (b"b", b"goodbye")]
    for flow in (b"a", b"b", b"c"):
        queue.add_bulk(flow, frame(flow))
    queue.drop_bulk(b"b")
    assert taken(queue) == [b"hello", b"goodbye", b"a", b"c"]
    queue.control += [(b"a", b"hello"), (b"b", b"goodbye")]
    queue.add_bulk(b"a", frame(b"a"))
    queue.drop_all_but({b"b"})
    assert not queue.has_bulk
    assert list(queue.control) == [(b"b", b"goodbye")]


def test_late_bulk_comes_after_all_rounds_and_is_dropped_like_them() -> None:
    queue = Outbox(bytes(8))
    queue.add_bulk(b"download", frame(b"chunk 1"), late=True)
    queue.add_bulk(b"download", frame(b"chunk 2"), late=True)
    queue.add_bulk(b"a", frame(b"a1"))
    assert taken(queue) == [b"a1", b"chunk 1", b"chunk 2"]
    queue.add_bulk(b"download", frame(b"chunk 3"), late=True)
    assert queue.has_bulk
    queue.drop_bulk(b"download")
    assert not queue
