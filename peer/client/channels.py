"""Messages between the scripts of two peers: `Run.send` and `Run.receive`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import math
import os
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
from equipoise.averaging.messaging.sender import LOST_SECONDS, Notice
from equipoise.averaging.session.machine import SESSION_BYTES
from equipoise.peer.client import message_content
from equipoise.peer.client.interrupts import uninterrupted
from equipoise.peer.control import messages
from equipoise.peer.control.client import Connection
from equipoise.peer.errors import DaemonLost, Lost, Refused, Undecided
from equipoise.peer.shared_memory import MappedMemory, MemoryPool, SharedMemory

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
    memory: MappedMemory | None
    delivery: Delivery


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory of the daemon, which goes back when the last tensor in it is gone; as in `buffer_pool`."""

    back: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.back is not None and self.base is not None:
            self.back()


class Channels:
    """The messages of one script in one run; calls from any thread.

    It keeps each message until its receiver's script has read it, and gives it to the next daemon if its own is lost.
    """

    def __init__(self, run: str, script: bytes, link: Callable[[], Connection]) -> None:
        """`script` names this script, and `link` returns the present connection to the daemon."""
        self._run, self._script, self._link = run, script, link
        self._past: dict[str, Past] = {}
        self._met: dict[str, str] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._kept: dict[tuple[str, int], _Kept] = {}
        self._arrived: defaultdict[str, deque[messages.Arrival]] = defaultdict(deque)
        self._pool = MemoryPool()
        self._back: deque[int] = deque()
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
        memory: list[MappedMemory] = []
        content = message_content.encode(tensors, fields, codec, lambda size: self._room(size, memory))
        short, mapped = (b"", memory[0]) if memory else (bytes(content.numpy()), None)
        delivery = Delivery(peer, topic, self._check)
        with uninterrupted(), self._lock:
            waiting = [
                one for (to, _), one in self._kept.items() if to == peer and not one.request.acknowledged
            ]
            size = sum(one.request.size for one in waiting) + len(content)
            if len(waiting) >= MAX_WAITING or size > MAX_WAITING_BYTES:
                told = f"{count(len(waiting), 'message')} to {peer} wait for room, {size / 1e6:.1f} MB with this one"
                delivery.ended.set_exception(Refused(told, "wait for .result() of earlier ones"))
                return delivery
            self._numbers[peer] += 1
            whom, capacity = (self._run, peer, self._numbers[peer]), mapped.memory.capacity if mapped else 0
            request = messages.SendMessage(*whom, topic, len(content), short, capacity)
            kept = self._kept[peer, request.number] = _Kept(request, mapped, delivery)
            self._give(self._link(), kept)
        return delivery

    def receive(self, topic: str, timeout: float) -> Message | None:
        """See `Run.receive`."""
        deadline = time.monotonic() + timeout
        while (arrival := self._next(topic)) is None:
            left, link = max(deadline - time.monotonic(), 0.0), self._link()
            if link.lost is not None and left > 0:
                time.sleep(min(left, LOOK_SECONDS))  # Another may take its place.
                continue
            back = tuple(self._back.popleft() for _ in range(len(self._back)))
            asked = link.start(messages.ReceiveMessage(self._run, topic, max(left, LEAST_SECONDS), back))
            asked.add_done_callback(lambda reply: self._take(topic, reply))
            link.settled(asked, left)
            try:
                if link.wait(asked) is None and time.monotonic() >= deadline:
                    return None
            except DaemonLost:
                if left <= 0:
                    raise
        tensors, fields = message_content.decode(self._content(arrival))
        return Message(arrival.peer, topic, tensors, fields, arrival.script.hex())

    def renew(self) -> None:
        """Go on through a new daemon: give it what receivers have not read, as far as this script knows."""
        with self._lock:
            self._asking, self._lost_at = False, math.inf
            for kept in list(self._kept.values()):
                met = bytes.fromhex(self._met.get(kept.request.to, ""))
                kept.request = structs.replace(kept.request, again=True, receiver=met)
                self._give(self._link(), kept)

    def close(self, reason: str) -> None:
        """End: what is not acknowledged is lost."""
        with self._lock:
            kept, self._kept = self._kept, {}
            for one in kept.values():
                if not one.delivery.ended.done():
                    one.delivery.ended.set_exception(Lost(f"the message to {one.delivery.peer}: {reason}"))

    # ---- what the daemon says, in the thread of the link ----

    def _give(self, link: Connection, kept: _Kept) -> None:
        request = kept.request
        fds = [] if kept.memory is None else [kept.memory.memory.fd]
        link.start(request, fds).add_done_callback(lambda reply: self._given(request, reply))
        if not self._asking:
            self._asking = True
            link.start(messages.AskNotices(self._run)).add_done_callback(self._hear)

    def _given(self, request: messages.SendMessage, reply: concurrent.futures.Future[None]) -> None:
        error = reply.exception()
        if error is not None and not isinstance(error, DaemonLost):
            self._end(Notice(request.to, request.number, "refused", str(error)))

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
                self._asking = True
                self._link().start(messages.AskNotices(self._run)).add_done_callback(self._hear)

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
                kept.request = structs.replace(kept.request, acknowledged=True)
                if not ended.done():
                    ended.set_result(Delivered(notice.to, self._met.get(notice.to, "")))
                return False
            del self._kept[notice.to, notice.number]
            if kept.memory is not None:
                self._pool.give(kept.memory)
            if ended.done():
                return notice.how == "lost"
            told = f"the message to {notice.to}: {notice.reason}"
            ended.set_exception(Refused(told) if notice.how == "refused" else Lost(told))
            return False

    def _check(self) -> None:
        """End all deliveries if the daemon has been lost for too long."""
        link = self._link()
        if link.lost is not None and time.monotonic() - self._lost_at >= LOST_SECONDS:
            self.close(str(link.lost))

    def _take(self, topic: str, reply: concurrent.futures.Future[messages.Arrival | None]) -> None:
        # Here, and not where the caller waits: an interrupted call leaves the message to the next one.
        if reply.exception() is None and (arrival := reply.result()) is not None:
            with self._lock:
                self._past[arrival.peer] = arrival.past
                self._arrived[topic].append(arrival)

    def _next(self, topic: str) -> messages.Arrival | None:
        with self._lock:
            waiting = self._arrived.get(topic)
            return waiting.popleft() if waiting else None

    # ---- memory ----

    def _room(self, size: int, memory: list[MappedMemory]) -> torch.Tensor:
        """Memory for a message, u8 [size]: shared and added to `memory`, unless it is short.

        Raises:
            Refused: The machine has not enough memory.
            ValueError: It is longer than messages may be.
        """
        if size <= messages.SHORT_BYTES:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        if size > MAX_WAITING_BYTES:
            raise ValueError(
                f"expected a message of at most {MAX_WAITING_BYTES} bytes, got {size}: send parts"
            )
        with self._lock:
            memory.append(self._pool.take(size))
        return torch.frombuffer(memory[0].room(0, size), dtype=torch.uint8)

    def _content(self, arrival: messages.Arrival) -> torch.Tensor:
        if arrival.content:
            return torch.frombuffer(bytearray(arrival.content), dtype=torch.uint8)
        with contextlib.closing(SharedMemory(arrival.fd, arrival.capacity)) as memory:
            mapped = np.frombuffer(memory.view(arrival.capacity, writable=True), np.uint8)
        lent = _Lent(arrival.size, np.uint8, mapped)
        if arrival.memory:
            lent.back = functools.partial(self._back.append, arrival.memory)
        return torch.from_numpy(lent)


def new_mailbox() -> Mailbox:
    """The mailbox of a script that joins a run; its name is random."""
    return Mailbox(os.urandom(SESSION_BYTES))
