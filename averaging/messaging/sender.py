"""The messages of this peer's script to one other: sent in order, again after a cut, kept until they were read.

```
closed --Added, SendOpen--> asking --a receipt--> open --no room--> waiting --granted--> open
   ^                          |                    |                  |
   |   silent for LOST_SECONDS: "lost"             |                  |
   +----------------Closed: what is kept is asked for again-----------+
```

A message is acknowledged when it waits whole at the receiver's daemon. It is kept until the receiver's script has read
it, because that daemon may die before. So only the end of a script loses messages that were acknowledged.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from equipoise.averaging.messaging.messages import Number, Receipt
from equipoise.averaging.session.machine import SESSION_BYTES
from equipoise.limits import backoff

RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 5.0
"""Shortest and longest time between two questions to a receiver that does not answer."""

LOST_SECONDS = 30.0
"""Longest silence of a receiver before messages that it has not acknowledged are lost. A daemon that was killed is
started again, and found by its script and by others, within ten."""

VOID = -1
"""The turn of a sender that is not open: nothing of it may leave."""

How = Literal["met", "acknowledged", "read", "refused", "lost"]


class Added(msgspec.Struct, frozen=True):
    """The script sends a message.

    Attributes:
        number: Grows with each message of the script to this receiver.
        acknowledged: Whether the receiver's daemon had it, by a daemon that was lost.
        again: Whether such a daemon was given it.
        receiver: The receiver's script, as far as that daemon had met it.
    """

    number: Number
    acknowledged: bool = False
    again: bool = False
    receiver: Annotated[bytes, msgspec.Meta(max_length=SESSION_BYTES)] = b""


class Received(msgspec.Struct, frozen=True):
    """A receipt came."""

    receipt: Receipt


class Unknown(msgspec.Struct, frozen=True):
    """No such peer is in the run with equal terms."""

    reason: str


class Closed(msgspec.Struct, frozen=True):
    """The receiver takes nothing now, for it cannot be reached or says so; or nothing more if that is `final`."""

    reason: str
    final: bool = False


class Woke(msgspec.Struct, frozen=True):
    """The deadline has come."""


class SendOpen(msgspec.Struct, frozen=True):
    """Ask the receiver what it has."""


class SendParts(msgspec.Struct, frozen=True):
    """Send a message in this turn, or ask for room for it if it is to be `bare`."""

    number: int
    bare: bool


class Notice(msgspec.Struct, frozen=True):
    """Tell the script what became of a message, with the reason; or that the peer's script has the name `reason`."""

    to: str
    number: int
    how: How
    reason: str = ""


SenderEvent = Added | Received | Closed | Unknown | Woke
SenderAction = SendOpen | SendParts | Notice


class _Kept(msgspec.Struct):
    """A message that was not read yet: whether it was ever sent whole, and whether it need not be sent in this turn."""

    number: int
    at: float
    again: bool
    acknowledged: bool
    sent: bool = False
    done: bool = False


class Sender:
    """The messages from one script to one receiver.

    Attributes:
        turn: That of what is sent now; what was sent in earlier turns is void.
        deadline: When to wake it.
    """

    def __init__(self, to: str) -> None:
        self.turn = VOID
        self.deadline = math.inf
        self._to = to
        self._receiver = b""
        self._kept: dict[int, _Kept] = {}
        self._open = False
        self._waits = False
        self._eager = True
        self._asked = 0
        self._silent_since = math.inf
        self._pause = 0.0
        self._why = "it does not answer"

    def handle(self, event: SenderEvent, now: float) -> list[SenderAction]:
        """Take in an event; return what is to be done."""
        actions: list[SenderAction] = []
        match event:
            case Added(number, acknowledged, again, script):
                self._receiver = self._receiver or script
                self._kept[number] = _Kept(number, now, again, acknowledged, sent=again)
            case Received(receipt) if not receipt.turn:
                self._close("it has lost this peer")
            case Received(receipt):
                actions = self._on_receipt(receipt)
            case Closed(reason, True):
                actions = [self._end(number, "lost", reason) for number in list(self._kept)]
                self._receiver = b""
                self._close(reason)
            case Unknown(reason) if not self._receiver:
                fresh = [number for number, one in self._kept.items() if not one.again]
                actions = [self._end(number, "refused", reason) for number in fresh]
                self._close(reason)
            case Closed(reason) | Unknown(reason):
                self._close(reason)
        return actions + (self._send() if self._open else self._ask(now))

    def _close(self, reason: str) -> None:
        self._open, self._why, self.turn = False, reason, VOID

    def _ask(self, now: float) -> list[SenderAction]:
        """Ask a receiver that does not answer, again and again while messages are kept."""
        if not self._kept:
            self._silent_since, self._pause, self.deadline = math.inf, 0.0, math.inf
            return []
        self._silent_since = min(self._silent_since, now)
        actions: list[SenderAction] = []
        for one in list(self._kept.values()):
            since = now - max(one.at, self._silent_since)
            if since >= LOST_SECONDS and not one.acknowledged:
                actions.append(
                    self._end(one.number, "lost", f"not acknowledged for {since:.0f} s: {self._why}")
                )
        if self.deadline == math.inf or now >= self.deadline:
            self._pause = backoff(self._pause, RETRY_SECONDS, MAX_RETRY_SECONDS)
            self.deadline = now + self._pause
            actions.append(SendOpen())
        return actions

    def _end(self, number: int, how: How, reason: str = "") -> SenderAction:
        del self._kept[number]
        return Notice(self._to, number, how, reason)

    def _on_receipt(self, receipt: Receipt) -> list[SenderAction]:
        actions: list[SenderAction] = []
        if receipt.receiver != self._receiver:
            if self._receiver:
                sent = [number for number, one in self._kept.items() if one.sent]
                actions = [self._end(number, "lost", "its script was started again") for number in sent]
            self._receiver = receipt.receiver
            actions.append(Notice(self._to, 0, "met", self._receiver.hex()))
        if not self._open or receipt.turn != self.turn:
            self._open, self.turn, self._asked = True, receipt.turn, 0
            for one in self._kept.values():
                one.done = False
        self._silent_since, self._pause, self.deadline = math.inf, 0.0, math.inf
        for one in list(self._kept.values()):
            if one.number <= receipt.seen and one.number not in receipt.missing:
                one.done = True
                if not one.acknowledged:
                    one.acknowledged = True
                    actions.append(Notice(self._to, one.number, "acknowledged"))
                if one.number not in receipt.held:
                    actions.append(self._end(one.number, "read"))
        self._waits = receipt.waits
        self._eager = not receipt.waits and (self._eager or not receipt.held)
        granted = self._kept.get(receipt.granted)
        if granted is not None and not granted.done:
            self._asked = 0
            actions.append(self._whole(granted))
        return actions

    def _whole(self, one: _Kept) -> SendParts:
        one.sent = one.done = True
        return SendParts(one.number, bare=False)

    def _send(self) -> list[SenderAction]:
        actions: list[SenderAction] = []
        for one in self._kept.values():
            if self._waits or self._asked:
                break
            if one.done:
                continue
            if self._eager:
                actions.append(self._whole(one))
            else:
                self._asked = one.number
                actions.append(SendParts(one.number, bare=True))
        return actions
