"""The messages of other scripts to this peer's: each whole once, in order, and no more than there is room for.

```
unknown --Opened--> idle --PartBegan, room--> growing --PartTaken, the last--> held --Took--> read
                     |  ^                        |
                 no room |                       +-- Opened again, PeerLost --> idle: what came of it is dropped
                     v  |                        +-- others wait, and too little comes --> idle, to send it anew
                    waiting, in line with other senders --Took of others--> growing, granted by a receipt
```
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from equipoise.averaging.messaging.messages import (
    MAX_WAITING,
    MAX_WAITING_BYTES,
    Counter,
    Numbers,
    Part,
    Receipt,
    ScriptId,
)

MAX_SENDERS = 1024
"""Most senders that are remembered; a run has few that live. The one that opened first is forgotten
first, unless messages of it wait for the script."""

STALL_SECONDS = 60.0
"""Longest time that a message with room does not grow while others wait for it. Rounds go before messages on a link."""

LEAST_RATE = 32 * 1024
"""Bytes a second: each that comes moves that time on by as much, so that nobody holds room by single bytes."""


class Past(msgspec.Struct, frozen=True):
    """What a script has read of a sender through a daemon before: all up to `seen`, but for `missing`."""

    peer: str
    sender: ScriptId
    seen: Counter
    missing: Numbers


class Mailbox(msgspec.Struct, frozen=True):
    """A script's part in the messages of a run: its id, and what it has read through daemons before this one."""

    script: ScriptId = bytes(8)
    past: tuple[Past, ...] = ()


class Opened(msgspec.Struct, frozen=True):
    """A script of a peer asks what there is of it."""

    peer: str
    sender: bytes


class PartBegan(msgspec.Struct, frozen=True):
    """A part begins to come in; if it is `bare`, nothing comes, and the sender asks for room."""

    peer: str
    part: Part
    bare: bool


class PartTaken(msgspec.Struct, frozen=True):
    """So many bytes of a part that was expected are here."""

    peer: str
    part: Part
    length: int


class Took(msgspec.Struct, frozen=True):
    """The script has read a message of a peer, as it was delivered."""

    peer: str
    part: Part


class PeerLost(msgspec.Struct, frozen=True):
    """No channel to a peer can be opened: what it was sending is lost."""

    peer: str


class Woke(msgspec.Struct, frozen=True):
    """The deadline has come."""


class Tell(msgspec.Struct, frozen=True):
    """Send the peer a receipt."""

    peer: str


class Deliver(msgspec.Struct, frozen=True):
    """A message is whole, of which this is the first part: the script may read it."""

    peer: str
    part: Part


class Discard(msgspec.Struct, frozen=True):
    """Free what has come of a peer's message."""

    peer: str


ReceiverEvent = Opened | PartBegan | PartTaken | Took | PeerLost | Woke
ReceiverAction = Tell | Deliver | Discard


class _Source:
    """One sender: what came of it, the message that is growing, and the one that waits for room."""

    def __init__(self, sender: bytes, seen: int = 0, missing: Numbers = ()) -> None:
        self.sender = sender
        self.turn = 0
        self.seen, self.missing = seen, set(missing)
        self.growing: Part | None = None
        self.filled = 0
        self.until = math.inf
        self.wanted: Part | None = None


class Receiver:
    """The messages to one script."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._script = mailbox.script
        self._sources = {one.peer: _Source(one.sender, one.seen, one.missing) for one in mailbox.past}
        self._held: dict[tuple[str, bytes, int], int] = {}
        self._line: deque[str] = deque()
        self._turn = 0
        self._now = 0.0

    @property
    def deadline(self) -> float:
        """When the first message is to have grown; infinite while there is room for all."""
        ends = [source.until for source in self._sources.values() if source.growing is not None]
        return min(ends, default=math.inf) if self._line else math.inf

    def handle(self, event: ReceiverEvent, now: float) -> list[ReceiverAction]:
        """Take in an event; return what is to be done."""
        self._now = now
        match event:
            case Opened(peer, sender):
                return self._on_opened(peer, sender)
            case PartBegan(peer, part, bare):
                return self._on_part(peer, part, bare)
            case PartTaken(peer, part, length):
                return self._on_taken(peer, part, length)
            case Took(peer, part):
                self._held.pop((peer, part.sender, part.number), None)
                return [Tell(peer) for peer in dict.fromkeys([peer, *self._grant()]) if peer in self._sources]
            case PeerLost(peer):
                return self._on_lost(peer)
            case Woke():
                return self._on_woke()

    def expects(self, peer: str, part: Part) -> bool:
        """True if the body of this part goes on with the message that is growing."""
        source = self._sources.get(peer)
        if source is None or source.growing is None or part.turn != source.turn:
            return False
        growing = source.growing
        return (part.number, part.size, part.offset) == (growing.number, growing.size, source.filled)

    def receipt(self, run: str, peer: str) -> Receipt:
        """What there is of a peer that has opened."""
        source = self._sources[peer]
        return Receipt(
            run,
            source.sender,
            self._script,
            source.turn,
            source.seen,
            held=self._unread(peer, source),
            missing=tuple(sorted(source.missing)),
            waits=source.wanted is not None,
            granted=0 if source.growing is None else source.growing.number,
        )

    def past(self, peer: str) -> Past:
        """What the script has read of the present sender of a peer that has opened."""
        source = self._sources[peer]
        unread = sorted((*source.missing, *self._unread(peer, source)))
        return Past(peer, source.sender, source.seen, tuple(unread[-MAX_WAITING:]))

    def _unread(self, peer: str, source: _Source) -> Numbers:
        return tuple(sorted(at[2] for at in self._held if at[:2] == (peer, source.sender)))

    @property
    def senders(self) -> dict[str, bytes]:
        """By peer, the script that sends."""
        return {peer: source.sender for peer, source in self._sources.items()}

    def _on_opened(self, peer: str, sender: bytes) -> list[ReceiverAction]:
        actions = self._reset(peer)
        if peer not in self._sources or self._sources[peer].sender != sender:
            self._sources.pop(peer, None)
            if len(self._sources) >= MAX_SENDERS:
                first = next(one for one, source in self._sources.items() if not self._unread(one, source))
                actions += self._reset(first)
                del self._sources[first]
            self._sources[peer] = _Source(sender)
        self._next_turn(self._sources[peer])
        return [*actions, Tell(peer), *map(Tell, self._grant())]

    def _on_lost(self, peer: str) -> list[ReceiverAction]:
        actions = self._reset(peer)
        if peer in self._sources and self._sources[peer].turn:
            self._sources[peer].turn = 0  # What is still on its way comes after what was lost.
            actions.append(Tell(peer))
        return [*actions, *map(Tell, self._grant())]

    def _on_woke(self) -> list[ReceiverAction]:
        """Take room back from senders that do not use it, if others wait."""
        if self._now < self.deadline:
            return []
        actions: list[ReceiverAction] = []
        for peer, source in self._sources.items():
            if source.growing is not None and self._now >= source.until:
                self._next_turn(source)
                actions += [*self._reset(peer), Tell(peer)]
        return [*actions, *map(Tell, self._grant())]

    def _on_part(self, peer: str, part: Part, bare: bool) -> list[ReceiverAction]:
        source = self._sources.get(peer)
        if source is None or (part.sender, part.turn) != (source.sender, source.turn) or not part.turn:
            return []
        is_old = part.number <= source.seen and part.number not in source.missing
        if is_old or part.offset or source.wanted or source.growing:
            return []
        source.wanted = part
        self._line.append(peer)
        granted = self._grant()
        if source.wanted is not None and not bare:
            self._next_turn(source)  # Its parts are on the way, and in vain.
        if source.wanted is None and not bare:
            granted.remove(peer)  # It has not asked.
        return list(map(Tell, dict.fromkeys([*granted, peer] if source.wanted is not None else granted)))

    def _on_taken(self, peer: str, part: Part, length: int) -> list[ReceiverAction]:
        if not self.expects(peer, part):
            return []
        source = self._sources[peer]
        source.filled += length
        source.until = min(self._now + STALL_SECONDS, source.until + length / LEAST_RATE)
        if source.filled < part.size:
            return []
        whole, source.growing = source.growing, None
        assert whole is not None, "it was expected"
        source.seen = max(source.seen, part.number)
        source.missing.discard(part.number)
        self._held[peer, source.sender, part.number] = part.size
        return [Deliver(peer, whole), Tell(peer)]

    def _next_turn(self, source: _Source) -> None:
        self._turn += 1
        source.turn = self._turn

    def _reset(self, peer: str) -> list[ReceiverAction]:
        """Forget what a peer was sending."""
        source = self._sources.get(peer)
        if source is None:
            return []
        growing, source.growing = source.growing, None
        if source.wanted is not None:
            source.wanted = None
            self._line.remove(peer)
        return [] if growing is None else [Discard(peer)]

    def _grant(self) -> list[str]:
        """Give room to those first in line, as far as there is any; return them."""
        granted = []
        growing = [source.growing for source in self._sources.values() if source.growing is not None]
        count, size = len(self._held) + len(growing), sum(self._held.values())
        size += sum(part.size for part in growing)
        while self._line:
            source = self._sources[self._line[0]]
            assert source.wanted is not None, "it is in line"
            count, size = count + 1, size + source.wanted.size
            if count > MAX_WAITING or size > MAX_WAITING_BYTES:
                break
            source.growing, source.wanted, source.filled = source.wanted, None, 0
            source.until = self._now + STALL_SECONDS
            granted.append(self._line.popleft())
        return granted
