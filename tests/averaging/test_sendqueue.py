"""Control before bulk, and rounds in turn."""

from __future__ import annotations

from equipoise.averaging.aio.sendqueue import Bulk, SendQueue


def frame(name: bytes) -> Bulk:
    return lambda: (name, b"body")


def taken(queue: SendQueue) -> list[bytes]:
    frames = []
    while made := queue.next_bulk():
        frames.append(made[0])
    return frames


def test_flows_take_turns_however_much_each_has_queued() -> None:
    queue = SendQueue()
    for name in (b"a1", b"a2", b"a3", b"a4"):
        queue.add_bulk(b"a", frame(name))
    for name in (b"b1", b"b2"):
        queue.add_bulk(b"b", frame(name))
    assert taken(queue) == [b"a1", b"b1", b"a2", b"b2", b"a3", b"a4"]
    assert not queue


def test_what_is_no_longer_wanted_costs_nobody_a_turn() -> None:
    queue = SendQueue()
    queue.add_bulk(b"a", lambda: None)
    queue.add_bulk(b"a", frame(b"a2"))
    queue.add_bulk(b"b", frame(b"b1"))
    assert taken(queue) == [b"b1", b"a2"]


def test_one_flow_or_all_are_dropped_and_control_stays() -> None:
    queue = SendQueue()
    queue.control.append(b"hello")
    for flow in (b"a", b"b", b"c"):
        queue.add_bulk(flow, frame(flow))
    queue.drop_bulk(b"b")
    assert taken(queue) == [b"a", b"c"]
    queue.add_bulk(b"a", frame(b"a"))
    queue.drop_bulk()
    assert not queue.has_bulk
    assert list(queue.control) == [b"hello"]


def test_what_can_wait_comes_after_all_rounds_and_is_dropped_like_them() -> None:
    queue = SendQueue()
    queue.add_bulk(b"download", frame(b"chunk 1"), late=True)
    queue.add_bulk(b"download", frame(b"chunk 2"), late=True)
    queue.add_bulk(b"a", frame(b"a1"))
    assert taken(queue) == [b"a1", b"chunk 1", b"chunk 2"]
    queue.add_bulk(b"download", frame(b"chunk 3"), late=True)
    assert queue.has_bulk
    queue.drop_bulk(b"download")
    assert not queue
