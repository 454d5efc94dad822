"""Messages between the scripts of two peers: `Run.send` and `Run.receive`."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs

from equipoise.averaging.counts import count
from equipoise.averaging.messaging.messages import MAX_TOPIC_CHARS, MAX_WAITING, MAX_WAITING_BYTES
from equipoise.averaging.messaging.receiver import Mailbox, Past
from equipoise.averaging.messaging.sender import LOST_SECONDS, Added, Notice
from equipoise.peer.client import message_content
from equipoise.peer.client.interrupts import uninterrupted
from equipoise.peer.control import messages
from equipoise.peer.control.client import Connection
from equipoise.peer.errors import DaemonLost, Lost, Refused, Undecided
from equipoise.peer.shared_memory import GRAIN_BYTES, Piece, Region

LEAST_SECONDS = 0.001
"""Least time for which a daemon is asked for a message."""

LOOK_SECONDS = 0.2
"""Time between two looks for a daemon in place of a lost one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Message:
    """A message of another script, which is of this process alone.

    Attributes:
        sender: PeerID of the sender.
        topic: The topic that it was sent on.
        tensors: By name, on the CPU.
        fields: By name.
        script: Names the script that sent it: another one where the sender's script was started again.
    """

    sender: str
    topic: str
    tensors: dict[str, torch.Tensor]
    fields: dict[str, Any]
    script: str = ""


class Delivered(NamedTuple):
    """A message waits whole at its receiver's daemon.

    Attributes:
        peer: PeerID of the receiver.
        script: Names its script: another one where that was started again, which has not what the one before had.
    """

    peer: str
    script: str


class Delivery:
    """A message that was sent.

    Attributes:
        peer: PeerID of the receiver.
        topic: The topic.
    """

    def __init__(self, peer: str, topic: str, check: Callable[[], None]) -> None:
        """`check` ends it if there has been no daemon for too long."""
        self.peer, self.topic = peer, topic
        self.ended: concurrent.futures.Future[Delivered] = concurrent.futures.Future()
        self._check = check

    def done(self) -> bool:
        """Return whether `result` returns or raises at once."""
        return self.ended.done()

    def result(self, timeout: float | None = None) -> Delivered:
        """Wait until the message waits at the receiver's daemon, whose script then gets it once.

        Args:
            timeout: Seconds to wait; by default until it is decided.

        Raises:
            Refused: It was not sent: too many wait for the receiver, or no such peer is in the run with equal terms.
            Lost: Nobody can say whether it arrives: the receiver has been silent for half a minute, or its script or
                this one has left the run.
            Undecided: A `Lost` that is not final: the message is under way, and may be acknowledged later.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.ended.done() and (left := deadline - time.monotonic()) > 0:
            concurrent.futures.wait([self.ended], min(left, LOST_SECONDS / 10))
            self._check()
        if not self.ended.done():
            raise Undecided(
                f"the message to {self.peer} is not acknowledged after {timeout:g} s, and under way"
            )
        return self.ended.result()


@dataclass
class _Kept:
    """A message that the receiver's script has not read, as far as this one knows."""

    request: messages.SendMessage
    content: Piece
    delivery: Delivery


class Channels:
    """The messages of one script in one run; calls from any thread.

    It keeps each message until its receiver's script has read it, and gives it to the next daemon if its own is lost.
    """

    def __init__(self, run: str, script: bytes, link: Connection, region: Region) -> None:
        """`script` names this script, and `link` leads to its daemon, which has `region`."""
        self._run, self._script, self._link, self._region = run, script, link, region
        self._past: dict[str, Past] = {}
        self._met: dict[str, str] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._kept: dict[tuple[str, int], _Kept] = {}
        self._arrived: defaultdict[str, deque[tuple[messages.Arrival, Piece]]] = defaultdict(deque)
        self._back: deque[int] = deque()
        self._lent: dict[int, int] = {}
        self._asking = False
        self._lost_at = math.inf
        self._lock = threading.RLock()

    @property
    def mailbox(self) -> Mailbox:
        """What a daemon must know of this script."""
        with self._lock:
            return Mailbox(self._script, tuple(self._past.values()))

    def send(
        self,
        peer: str,
        topic: str,
        tensors: Mapping[str, torch.Tensor],
        codec: str,
        fields: Mapping[str, Any],
    ) -> Delivery:
        """See `Run.send`."""
        if not isinstance(topic, str) or len(topic) > MAX_TOPIC_CHARS:
            raise ValueError(
                f"expected a topic of at most {MAX_TOPIC_CHARS} characters, got {str(topic)[:80]!r}"
            )
        pieces, delivery, region = list[Piece](), Delivery(peer, topic, self._check), self._region
        try:
            message_content.encode(tensors, fields, codec, lambda size: self._room(region, size, pieces))
        except Refused as error:
            delivery.ended.set_exception(error)
            return delivery
        with uninterrupted(), self._lock:
            content = pieces[0] if region is self._region else self._moved(pieces[0])
            kept = [one for (to, _), one in self._kept.items() if to == peer]
            waiting = [one for one in kept if not one.request.added.acknowledged]
            size = sum(one.request.size for one in waiting) + len(content)
            if len(waiting) >= MAX_WAITING or size > MAX_WAITING_BYTES:
                told = f"{count(len(waiting), 'message')} to {peer} wait for room, {size / 1e6:.1f} MB with this one"
                delivery.ended.set_exception(Refused(told, "wait for .result() of earlier ones"))
                return delivery
            self._numbers[peer] += 1
            added = Added(self._numbers[peer])
            request = messages.SendMessage(self._run, peer, topic, content.at, len(content), added)
            self._kept[peer, added.number] = _Kept(request, content, delivery)
            self._give(request)
        return delivery

    def receive(self, topic: str, timeout: float) -> Message | None:
        """See `Run.receive`."""
        deadline = time.monotonic() + timeout
        while (arrived := self._next(topic)) is None:
            left, link = max(deadline - time.monotonic(), 0.0), self._link
            if link.lost is not None and left > 0:
                time.sleep(min(left, LOOK_SECONDS))  # Another may take its place.
                continue
            with self._lock:
                back, link = self._given_back(), self._link
            asked = link.start(messages.ReceiveMessage(self._run, topic, max(left, LEAST_SECONDS), back))
            asked.add_done_callback(lambda reply: self._take(topic, reply))
            link.settled(asked, left)
            try:
                if link.wait(asked) is None and time.monotonic() >= deadline:
                    return None
            except DaemonLost:
                if left <= 0:
                    raise
        arrival, piece = arrived
        tensors, fields = message_content.decode(self._content(arrival, piece))
        return Message(arrival.peer, topic, tensors, fields, arrival.script.hex())

    def renew(self, link: Connection, region: Region) -> None:
        """Go on through a new daemon: give it what receivers have not read, as far as this script knows."""
        with self._lock:
            self._link, self._region, self._asking, self._lost_at = link, region, False, math.inf
            self._back, self._lent = deque(), {}  # What was lent before goes back to nobody.
            for kept in list(self._kept.values()):
                met = bytes.fromhex(self._met.get(kept.request.to, ""))
                try:
                    kept.content = self._moved(kept.content)
                except Refused as error:
                    self._end(Notice(kept.request.to, kept.request.added.number, "lost", str(error)))
                    continue
                added = structs.replace(kept.request.added, again=True, receiver=met)
                kept.request = structs.replace(kept.request, at=kept.content.at, added=added)
                self._give(kept.request)

    def close(self, reason: str) -> None:
        """End: what is not acknowledged is lost."""
        with self._lock:
            kept, self._kept = self._kept, {}
            for one in kept.values():
                if not one.delivery.ended.done():
                    one.delivery.ended.set_exception(Lost(f"the message to {one.delivery.peer}: {reason}"))

    # ---- what the daemon says, in the thread of the link ----

    def _give(self, request: messages.SendMessage) -> None:
        self._link.start(request).add_done_callback(lambda reply: self._given(request, reply))
        self._ask()

    def _given(self, request: messages.SendMessage, reply: concurrent.futures.Future[None]) -> None:
        error = reply.exception()
        if error is not None and not isinstance(error, DaemonLost):
            self._end(Notice(request.to, request.added.number, "refused", str(error)))

    def _ask(self) -> None:
        if not self._asking:
            self._asking = True
            self._link.start(messages.AskNotices(self._run)).add_done_callback(self._hear)

    def _hear(self, reply: concurrent.futures.Future[tuple[Notice, ...]]) -> None:
        with self._lock:
            self._asking = False
            if reply.exception() is not None:
                self._lost_at = time.monotonic()
                return
            unread = Counter((one.to, one.reason) for one in reply.result() if self._end(one))
            for (to, reason), number in unread.items():
                told = f"{count(number, 'message')} to {to} had arrived and was not read: {reason}"
                log.warning("run %s: %s", self._run, told)
            if self._kept and reply.result():
                self._ask()

    def _end(self, notice: Notice) -> bool:
        """Note what became of a message; return whether it was lost though it was acknowledged."""
        with self._lock:
            if notice.how == "met":
                self._met[notice.to] = notice.reason
            kept = self._kept.get((notice.to, notice.number))
            if kept is None:
                return False
            ended = kept.delivery.ended
            if notice.how == "acknowledged":
                added = structs.replace(kept.request.added, acknowledged=True)
                kept.request = structs.replace(kept.request, added=added)
                if not ended.done():
                    ended.set_result(Delivered(notice.to, self._met.get(notice.to, "")))
                return False
            del self._kept[notice.to, notice.number]
            if ended.done():
                return notice.how == "lost"
            told = f"the message to {notice.to}: {notice.reason}"
            ended.set_exception(Refused(told) if notice.how == "refused" else Lost(told))
            return False

    def _check(self) -> None:
        """End all deliveries if the daemon has been lost for too long."""
        if self._link.lost is not None and time.monotonic() - self._lost_at >= LOST_SECONDS:
            self.close(str(self._link.lost))

    def _take(self, topic: str, reply: concurrent.futures.Future[messages.Arrival | None]) -> None:
        # Here, and not where the caller waits: an interrupted call leaves the message to the next one.
        if reply.exception() is None and (arrival := reply.result()) is not None:
            with self._lock:
                self._past[arrival.peer] = arrival.past
                piece = self._region.received.piece(arrival.at, arrival.size, self._back.append)
                self._arrived[topic].append((arrival, piece))

    def _next(self, topic: str) -> tuple[messages.Arrival, Piece] | None:
        with self._lock:
            waiting = self._arrived.get(topic)
            return waiting.popleft() if waiting else None

    # ---- memory ----

    def _room(self, region: Region, size: int, pieces: list[Piece]) -> torch.Tensor:
        """Memory of a region for a message, u8 [size], which is added to `pieces`.

        Raises:
            Refused: The machine has not enough memory, or too much waits.
            ValueError: It is longer than messages may be.
        """
        if size > MAX_WAITING_BYTES:
            told = f"expected a message of at most {MAX_WAITING_BYTES} bytes, got {size}"
            raise ValueError(f"{told}: send parts")
        with self._lock:
            pieces.append(region.sent.take(size))
        return torch.frombuffer(pieces[0].room(0, size), dtype=torch.uint8)

    def _moved(self, content: Piece) -> Piece:
        """A copy in the present region of what was written into that of a lost daemon; raises Refused without room."""
        copy = self._region.sent.take(len(content))
        copy.room(0, len(content))[:] = content.data
        return copy

    def _content(self, arrival: messages.Arrival, piece: Piece) -> torch.Tensor:
        """The message, u8 [size]: lent as long as a tensor of it lives; or a copy, if it is short or much is lent."""
        with self._lock:
            if not GRAIN_BYTES < arrival.size <= MAX_WAITING_BYTES - sum(self._lent.values()):
                return torch.from_numpy(np.array(piece))
            self._lent[arrival.at] = arrival.size
        return torch.from_numpy(piece)

    def _given_back(self) -> tuple[int, ...]:
        """The pieces that no tensor needs any more."""
        with self._lock:
            back = tuple(self._back.popleft() for _ in range(len(self._back)))
            for at in back:
                self._lent.pop(at, None)
        return back
