"""What a script keeps, lends and tells of its messages, beside a daemon that is played by hand."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from equipoise.averaging.messaging.receiver import Past
from equipoise.averaging.messaging.sender import Notice
from equipoise.peer.client import channels as module
from equipoise.peer.client.channels import Channels
from equipoise.peer.control.messages import Arrival, AskNotices, ReceiveMessage, SendMessage
from equipoise.peer.errors import DaemonLost, Lost, Refused
from equipoise.peer.shared_memory import GRAIN_BYTES, Piece, Region

THERE = b"there..."


class Link:
    """A connection whose requests a test answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Future[Any]]] = []
        self.arrivals: list[Arrival] = []
        self.lost: DaemonLost | None = None

    def start(self, request: Any, fds: Any = ()) -> Future[Any]:
        reply: Future[Any] = Future()
        self.asked.append((request, reply))
        if isinstance(request, ReceiveMessage):
            reply.set_result(self.arrivals.pop(0) if self.arrivals else None)
        return reply

    def settled(self, reply: Future[Any], seconds: float) -> None: ...

    def wait(self, reply: Future[Any]) -> Any:
        return reply.result()

    def of(self, kind: type) -> list[Any]:
        return [request for request, _ in self.asked if isinstance(request, kind)]

    def tell(self, *notices: Notice) -> None:
        """Answer the last question for notices."""
        replies = [reply for request, reply in self.asked if isinstance(request, AskNotices)]
        replies[-1].set_result(notices)

    def end(self) -> None:
        self.lost = DaemonLost("gone")
        for _, reply in self.asked:
            if not reply.done():
                reply.set_exception(self.lost)


def begun() -> tuple[Channels, Link, Region]:
    link, region = Link(), Region.create(10)
    return Channels("run", b"script..", link, region), link, region  # type: ignore[arg-type]


def content(region: Region, request: SendMessage) -> bytes:
    return bytes(region.sent.piece(request.at, request.size).data)


def arrive(link: Link, region: Region, sent: SendMessage, of: Region) -> Piece:
    """Have the daemon hold a message that a script has sent; returns the daemon's piece."""
    piece = region.received.take(sent.size)
    piece.room(0, sent.size)[:] = content(of, sent)
    past = Past("b", THERE, sent.added.number, ())
    link.arrivals.append(Arrival("b", THERE, past, piece.at, sent.size))
    return piece


def test_a_message_is_kept_until_it_was_read_and_its_memory_serves_again() -> None:
    channels, link, _ = begun()
    first = channels.send("b", "t", {"x": torch.ones(3)}, "raw", {})
    link.tell(Notice("b", 0, "met", "ab" * 8), Notice("b", 1, "acknowledged"))
    assert first.result(0) == ("b", "ab" * 8)
    channels.send("b", "t", {}, "raw", {})
    one, two = link.of(SendMessage)
    assert (one.added.number, two.added.number) == (1, 2)
    assert one.at != two.at, "the first is not read"
    link.tell(Notice("b", 1, "read"))
    channels.send("b", "t", {}, "raw", {})
    assert link.of(SendMessage)[2].at == one.at


def test_another_daemon_is_given_what_was_not_read_and_where_it_lies_there() -> None:
    channels, link, region = begun()
    for index in range(3):
        channels.send("b", "t", {"x": torch.full((3,), float(index))}, "raw", {})
    link.tell(Notice("b", 0, "met", "ab" * 8), Notice("b", 1, "read"), Notice("b", 2, "acknowledged"))
    before = [content(region, request) for request in link.of(SendMessage)]
    link.end()
    again, place = Link(), Region.create(10)
    channels.renew(again, place)  # type: ignore[arg-type]
    given = again.of(SendMessage)
    assert [(one.added.number, one.added.acknowledged, one.added.again) for one in given] == [
        (2, True, True),
        (3, False, True),
    ]
    assert all(one.added.receiver == b"\xab" * 8 for one in given)
    assert [content(place, one) for one in given] == before[1:]


def test_what_becomes_of_messages_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    channels, link, _ = begun()
    sent = [channels.send("b", "t", {}, "raw", {}) for _ in range(4)]
    link.tell(Notice("b", 1, "acknowledged"), Notice("b", 2, "lost", "x"), Notice("b", 3, "refused", "y"))
    assert sent[0].done()
    with pytest.raises(Lost, match="the message to b: x"):
        sent[1].result(0)
    with pytest.raises(Refused, match="the message to b: y"):
        sent[2].result(0)
    link.tell(Notice("b", 1, "lost", "its script was started again"))
    assert "1 message to b had arrived and was not read: its script was started again" in caplog.text
    channels.close("this script has left the run")
    with pytest.raises(Lost, match="has left the run"):
        sent[3].result(0)


def test_tensors_are_lent_until_the_last_of_them_goes_and_short_ones_are_copied() -> None:
    channels, link, region = begun()
    large, short = torch.arange(float(GRAIN_BYTES)), torch.ones(3)
    for tensor in (large, short):
        channels.send("b", "t", {"x": tensor}, "raw", {"n": 1})
    pieces = [arrive(link, region, one, region) for one in link.of(SendMessage)]
    first, second = channels.receive("t", 0), channels.receive("t", 0)
    assert first is not None
    assert second is not None
    assert torch.equal(first.tensors["x"], large)
    assert torch.equal(second.tensors["x"], short)
    assert channels.receive("t", 0) is None
    assert [one.back for one in link.of(ReceiveMessage)] == [(), (), (pieces[1].at,)]
    kept = first.tensors["x"][5:7]
    del first
    channels.receive("t", 0)
    assert link.of(ReceiveMessage)[-1].back == ()
    assert kept.tolist() == [5, 6]
    del kept
    channels.receive("t", 0)
    assert link.of(ReceiveMessage)[-1].back == (pieces[0].at,)
    assert channels.mailbox.past == (Past("b", THERE, 2, ()),)


def test_a_script_that_keeps_much_of_what_it_is_lent_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    channels, link, region = begun()
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 600_000)
    channels.send("b", "t", {"x": torch.ones(100_000)}, "raw", {})
    pieces = [arrive(link, region, link.of(SendMessage)[0], region) for _ in range(2)]
    got = [channels.receive("t", 0) for _ in range(2)]
    channels.receive("t", 0)
    assert link.of(ReceiveMessage)[-1].back == (pieces[1].at,)
    assert len(got) == 2
