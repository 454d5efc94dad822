"""The asyncio driver of the messages between the script of this daemon in one run and those of other peers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from equipoise.averaging.aio.sessions import Placed, Sessions
from equipoise.averaging.messaging import messages, receiver, sender
from equipoise.averaging.messaging.messages import MAX_WAITING, Open, Part, Receipt, Refusal, RunMessage
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.session.outbox import Frame
from equipoise.limits import Allowance
from equipoise.tasks import Driver, TaskSet, sleep_until

MESSAGE_FRAME = b"C"
"""First byte of the header of every frame of messages between scripts."""

PART_BYTES = 1024 * 1024
"""Bytes of a part: a hundredth of a second on a link of 1 Gbit/s, for which a round may wait."""

OPENS_SECONDS, MAX_OPENS, MAX_OPENS_OF_ONE = 0.5, 256, 8
"""Bounds how many senders are looked up in the directory, in so many seconds: in all, and of one peer."""

MAX_RECEIVERS = 256
"""Most peers to which this script's state is kept; those for which nothing waits are forgotten first."""

NOT_THERE = "no such peer is in the run with equal terms, as far as this one knows"


class Memory(Protocol):
    """Memory of a message that comes in, which the script will read."""

    def room(self, start: int, size: int) -> memoryview:
        """These bytes of it, u8 [size], writable; raises ValueError if the machine has no memory for them."""


class Arrived(NamedTuple):
    """A message of a peer, of which `part` is the first one, for the script to read."""

    peer: str
    part: Part
    memory: Memory


class _Outgoing:
    """The messages to one receiver, and their contents by number."""

    def __init__(self, to: str, perform: Callable[[sender.SenderAction], None]) -> None:
        self.machine = sender.Sender(to)
        self.credential = b""
        self.contents: dict[int, tuple[str, memoryview]] = {}
        self.driver = Driver(self.machine, perform, sender.Woke)


class Messenger:
    """Sends and receives the messages of one script.

    Args:
        run: The run, as scripts call it.
        mailbox: The script, and what it has read through daemons before this one.
        sessions: Carries frames.
        mates: Looks for the other peers of the run with equal terms, to which this script may send, or of which it may
            receive if called with True; returns their credentials, by PeerID.
        allocate: Sets memory aside for a message of so many bytes.
    """

    def __init__(
        self,
        run: str,
        mailbox: receiver.Mailbox,
        sessions: Sessions,
        mates: Callable[[bool], Awaitable[Mapping[str, bytes]]],
        allocate: Callable[[int], Memory],
    ) -> None:
        self.run = run
        self._script = mailbox.script
        self._sessions = sessions
        self._mates, self._allocate = mates, allocate
        self._outgoing: dict[str, _Outgoing] = {}
        self._inbox = receiver.Receiver(mailbox)
        self._receiving = Driver(self._inbox, self._receive, receiver.Woke)
        self._growing: dict[str, Memory] = {}
        self._arrived: dict[str, deque[Arrived]] = {}
        self._ended: list[sender.Notice] = []
        self._news = asyncio.Event()
        self._opens = Allowance(OPENS_SECONDS, MAX_OPENS, MAX_OPENS_OF_ONE)
        self._tasks = TaskSet()
        self._closed = False

    # ---- the face ----

    def send(self, to: str, topic: str, content: memoryview, added: sender.Added) -> None:
        """Send a message; `notices` tells what becomes of it.

        Raises:
            ValueError: Too many wait for the receiver: the script is to count them.
        """
        outgoing = self._outgoing.get(to) or self._add(to)
        if len(outgoing.contents) >= 2 * MAX_WAITING:  # Of those, as many may be acknowledged.
            raise ValueError(f"expected at most {2 * MAX_WAITING} messages that {to} has not read")
        outgoing.contents[added.number] = topic, content
        outgoing.driver.tell(added)

    async def notices(self) -> list[sender.Notice]:
        """Wait until something became of messages, and return what; nothing once this is closed."""
        while not self._ended and not self._closed:
            self._news.clear()
            await self._news.wait()
        ended, self._ended = self._ended[:MAX_WAITING], self._ended[MAX_WAITING:]
        return ended

    async def receive(self, topic: str, timeout: float) -> tuple[Arrived, receiver.Past] | None:
        """Take the message of this topic that came first, or the next one within `timeout` seconds.

        Another daemon of the script must know what it has of the sender from then on.
        """
        until = _now() + timeout
        while not (waiting := self._arrived.get(topic)):
            left = until - _now()
            if left <= 0 or self._closed:
                return None
            self._news.clear()
            await sleep_until(self._news, left)
        one = waiting.popleft()
        if not waiting:
            del self._arrived[topic]
        self._receiving.tell(receiver.Took(one.peer, one.part))
        return one, self._inbox.past(one.peer)

    def close(self, reason: str, final: bool) -> None:
        """Send and receive nothing more; if it is `final`, senders hear that the script reads nothing any more."""
        self._closed = True
        for peer, script in self._inbox.senders.items():
            self._post(peer, Refusal(self.run, script, reason[:200], final))
        for outgoing in self._outgoing.values():
            outgoing.driver.stop()
            outgoing.contents.clear()
        self._receiving.stop()
        self._growing.clear()
        self._arrived.clear()
        self._tasks.cancel()
        self._news.set()

    # ---- what the router tells ----

    def place(self, peer: str, message: RunMessage, size: int) -> Placed:
        """Place the body of a frame; raises `FrameRefused`."""
        if not isinstance(message, Part) or message.offset + size > message.size:
            raise FrameRefused(f"expected a body only within a message, got {size} bytes")
        self._begin(peer, message, bare=False)
        if not self._inbox.expects(peer, message):
            return self._sessions.scratch(size)
        try:
            if not message.offset:
                self._growing[peer] = self._allocate(message.size)
            room = self._growing[peer].room(message.offset, size)
        except ValueError as error:
            self._receiving.tell(receiver.PeerLost(peer))
            self._post(peer, Refusal(self.run, self._inbox.senders[peer], ascii(str(error))[:200]))
            return self._sessions.scratch(size)
        taken = receiver.PartTaken(peer, message, size)
        return room, lambda _: self._receiving.tell(taken)

    def frame(self, peer: str, message: RunMessage) -> None:
        """Take a frame without a body."""
        match message:
            case Open(_, script):
                if self._opens.admits(peer, _now()):
                    self._tasks.spawn(self._on_open(peer, script))
            case Part():
                self._begin(peer, message, bare=True)
            case Receipt(_, script):
                if outgoing := self._outgoing.get(peer):
                    self._sessions.approach(peer, outgoing.credential)
                self._tell(peer, script, sender.Received(message))
            case Refusal(_, script, reason, final):
                self._tell(peer, script, sender.Closed(reason, final))

    def lost(self, peer: str, reason: str) -> None:
        """Note that a peer cannot be reached, and that frames to or from it are lost."""
        self._tell(peer, self._script, sender.Closed(reason))
        self._receiving.tell(receiver.PeerLost(peer))

    # ---- sending ----

    def _add(self, to: str) -> _Outgoing:
        if len(self._outgoing) >= MAX_RECEIVERS:
            idle = [peer for peer, outgoing in self._outgoing.items() if not outgoing.contents]
            for peer in idle[:1]:
                self._outgoing.pop(peer).driver.stop()
        outgoing = self._outgoing[to] = _Outgoing(to, partial(self._send, to))
        return outgoing

    def _tell(self, peer: str, script: bytes, event: sender.SenderEvent) -> None:
        if script == self._script and peer in self._outgoing:
            self._outgoing[peer].driver.tell(event)

    def _send(self, to: str, action: sender.SenderAction) -> None:
        match action:
            case sender.SendOpen():
                self._tasks.spawn(self._open(to))
            case sender.SendParts(number, bare):
                turn, (topic, content) = self._outgoing[to].machine.turn, self._outgoing[to].contents[number]
                for offset in range(0, 1 if bare else len(content), PART_BYTES):
                    part = Part(self.run, self._script, turn, number, topic, len(content), offset)
                    make = partial(self._make, to, part, bare)
                    self._sessions.post_bulk(to, MESSAGE_FRAME + self._script, make, late=True)
            case sender.Notice(_, number, how):
                if how not in ("met", "acknowledged"):
                    del self._outgoing[to].contents[number]
                self._ended.append(action)
                self._news.set()

    async def _open(self, to: str) -> None:
        mates = await self._mates(False)
        if to not in mates or to not in self._outgoing:
            self._tell(to, self._script, sender.Unknown(NOT_THERE))
            return
        self._sessions.admit(to, mates[to])  # It opens a direct channel before it answers.
        self._outgoing[to].credential = mates[to]
        self._post(to, Open(self.run, self._script))

    def _make(self, to: str, part: Part, bare: bool) -> Frame | None:
        outgoing = self._outgoing.get(to)
        if outgoing is None or outgoing.machine.turn != part.turn or part.number not in outgoing.contents:
            return None
        _, content = outgoing.contents[part.number]
        body = b"" if bare else content[part.offset : part.offset + PART_BYTES]
        return MESSAGE_FRAME + messages.encode(part), body

    def _post(self, peer: str, message: RunMessage) -> None:
        self._sessions.post(peer, MESSAGE_FRAME + messages.encode(message))

    # ---- receiving ----

    async def _on_open(self, peer: str, script: bytes) -> None:
        mates = await self._mates(True)
        if peer not in mates:
            self._post(
                peer, Refusal(self.run, script, "this peer knows of no such peer of the run with its terms")
            )
            return
        self._sessions.approach(peer, mates[peer])
        self._receiving.tell(receiver.Opened(peer, script))

    def _begin(self, peer: str, part: Part, bare: bool) -> None:
        if peer not in self._inbox.senders:  # This daemon was started again, and the other does not know.
            self._post(peer, Refusal(self.run, part.sender, "it has opened at another daemon"))
        self._receiving.tell(receiver.PartBegan(peer, part, bare))

    def _receive(self, action: receiver.ReceiverAction) -> None:
        match action:
            case receiver.Tell(peer):
                self._post(peer, self._inbox.receipt(self.run, peer))
            case receiver.Deliver(peer, part):
                arrived = Arrived(peer, part, self._growing.pop(peer))
                self._arrived.setdefault(part.topic, deque()).append(arrived)
                self._news.set()
            case receiver.Discard(peer):
                self._growing.pop(peer, None)


def _now() -> float:
    return asyncio.get_running_loop().time()
