"""Work of a daemon that hangs ends for its client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from equipoise.peer.client.futures import HUNG_SECONDS, LEAST_SECONDS, PendingRound
from equipoise.peer.control import messages
from equipoise.peer.control.client import Connection
from equipoise.peer.errors import DaemonLost, EquipoiseError


class Hung(Connection):
    """A daemon that takes requests and answers none, in virtual time."""

    def __init__(self) -> None:
        self.now = 100.0

    def start(self, request: messages.Request[Any], fds: Sequence[int] = ()) -> Future[Any]:
        return Future()

    def wait(self, reply: Future[Any], timeout: float = 10.0) -> Any:
        self.now += timeout
        raise DaemonLost("the daemon has not answered")

    def settled(self, reply: Future[Any], timeout: float = 0.0) -> bool:
        self.now += timeout
        return reply.done()

    def clock(self) -> float:
        return self.now

    def watch(self, watcher: Callable[[EquipoiseError], None] | None) -> None:
        raise AssertionError("nobody watches it here")

    def close(self) -> None:
        self.lost = DaemonLost("closed")


def test_a_round_is_done_once_its_daemon_should_have_answered() -> None:
    link = Hung()
    request = messages.StartRound("digits", "average", 1.0, 30.0)
    pending = PendingRound(link, request, link.now + 30.0, lambda outcome: None, 0.0)
    waits = 0
    while not pending.wait(0.25):
        waits += 1
    assert pending.done()
    assert link.now == 130.0 + HUNG_SECONDS
    assert waits == (30.0 + HUNG_SECONDS) // 0.25 - 1
    outcome = pending.result()
    assert not outcome
    assert "has not answered" in outcome.reason
    assert outcome.in_doubt, "the daemon may have voted"
    assert link.now == 130.0 + HUNG_SECONDS + LEAST_SECONDS
