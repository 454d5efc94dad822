"""The client's end of the control socket, with a daemon that is slow, silent, or not read."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from equipoise.peer.control.client import Link
from equipoise.peer.control.messages import (
    AskStatus,
    LeaveRun,
    Ping,
    decode_number,
    decode_request,
    encode_reply,
)
from equipoise.peer.control.socket import FrameDecoder
from equipoise.peer.errors import DaemonLost

TIMEOUT = 0.1


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


class Busy(threading.Thread):
    """A daemon that answers a `LeaveRun` after the third ping, and pings at once."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(daemon=True)
        self._socket = connected
        self.pings = 0

    def run(self) -> None:
        decoder, asked = FrameDecoder(), 0
        while data := self._socket.recv(4096):
            for frame in decoder.feed(data):
                number, content = decode_number(frame)
                if isinstance(decode_request(content), LeaveRun):
                    asked = number
                    continue
                self.pings += 1
                self._socket.sendall(encode_reply(number))
                if self.pings == 3:
                    self._socket.sendall(encode_reply(asked))


def test_a_daemon_that_answers_pings_is_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    busy, link = Busy(ends[1]), Link(ends[0])
    busy.start()
    link._reader.start()

    link.ask(LeaveRun("digits"), TIMEOUT)

    assert link.lost is None
    assert busy.pings == 3


def test_a_silent_daemon_is_lost(ends: tuple[socket.socket, socket.socket]) -> None:
    link = Link(ends[0])
    link._reader.start()

    with pytest.raises(DaemonLost, match=r"has not answered for 0\.\d s"):
        link.ask(AskStatus(), TIMEOUT)


class Held(Link):
    """A link whose reader gets no turn before the third wait: another thread holds the GIL."""

    waits = 0

    def settled(self, reply: Future[Any], timeout: float = 0.0) -> bool:
        self.waits += 1
        if self.waits == 3:
            self._reader.start()
        return super().settled(reply, 10.0 if self.waits == 3 else timeout)


def test_an_answer_that_is_not_yet_read_counts(ends: tuple[socket.socket, socket.socket]) -> None:
    link = Held(ends[0])
    ends[1].sendall(encode_reply(1))

    link.ask(Ping(), TIMEOUT)

    assert link.lost is None


def test_a_line_of_the_daemon_is_logged(
    ends: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(ends[0])
    ends[1].sendall(encode_reply(0, "the daemon loads its kernels, once") + encode_reply(1))

    reply = link.start(Ping())
    link._reader.start()
    link.wait(reply)

    assert caplog.messages == ["the daemon loads its kernels, once"]
