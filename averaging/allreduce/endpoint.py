"""One member's end of a round: the machine, who is alive, and what may be sent when. Events in, actions out.

A member says that it lives every `HEARTBEAT_SECONDS`, for as long as others may need an answer from it, and takes for
lost who falls silent (`failure_detector`). Values leave only for members that have been heard: whoever says something
about the round knows it by the same manifest, and has a place for what comes. A member that cannot be dialled is about
to dial this one: to speak first would only make it look dead, so words wait for it as well.
"""

from __future__ import annotations

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import (
    Action,
    BytesReceived,
    Event,
    Group,
    PeerLost,
    PeerReturned,
    Send,
    SendContribution,
    SendMean,
    Withdrew,
    Woke,
)
from equipoise.averaging.allreduce.failure_detector import HEARTBEAT_SECONDS, FailureDetector
from equipoise.averaging.allreduce.machine import AllReduce

SILENT = "silent: no sign of life"


class Endpoint:
    """One member's end of a round.

    Args:
        group: The round as all members know it.
        me: This member's index.
        now: Monotonic seconds.
        timeout: Seconds until the round fails at the latest.

    Attributes:
        machine: Decides what the round comes to.
        others: The members that this one talks to: of two that cannot be dialled, neither reaches the other.
    """

    def __init__(self, group: Group, me: int, now: float, timeout: float) -> None:
        self.machine = AllReduce(group, me, now, timeout)
        dialable = group.dialable
        self.others = tuple(
            member for member in range(group.size) if member != me and dialable & (1 << member | 1 << me)
        )
        self._detector = FailureDetector(self.others, now)
        self._unheard: dict[int, list[Action]] = {member: [] for member in self.others}
        self._undialled = {member for member in self.others if not dialable >> member & 1}
        self._received = dict.fromkeys(self.others, 0)
        self._beats_at = now

    @property
    def deadline(self) -> float:
        """When `Woke` is due, in monotonic seconds; infinite once the round is closed."""
        return min(self.machine.deadline, self._beats_at) if self.machine.needed else self.machine.deadline

    def start(self, now: float) -> list[Action]:
        """The first actions: a sign of life for everyone, and what the machine begins with."""
        return self._beat(now) + self._gate(self.machine.start(now))

    def heard(self, member: int, now: float) -> list[Action]:
        """A frame of the round has come from a member: what waited for that leaves, before anything that follows."""
        returned = self._detector.heard(member, now)
        if not returned and member not in self._unheard:
            return []
        actions = self._tell(PeerReturned(member), now) if returned else []
        self._undialled.discard(member)
        return actions + self._unheard.pop(member, [])

    def received(self, member: int, count: int) -> None:
        """Bytes have come in from a member, those of frames under way included; told before `Woke`."""
        self._received[member] += count

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event, other than what `heard` and `received` tell; return what is to be done, in order."""
        match event:
            case PeerLost(member, _, connected):
                if not connected:
                    self._detector.lose(member)
                if not connected or member in self._unheard:
                    # Values that waited are asked for again; words are not.
                    waiting = self._unheard.get(member, [])
                    self._unheard[member] = [one for one in waiting if isinstance(one, Send)]
            case Woke():
                actions = self._beat(now) if self.machine.needed and now >= self._beats_at else []
                return actions + (self._tell(event, now) if now >= self.machine.deadline else [])
        return self._tell(event, now)

    def withdraw(self, reason: str, now: float) -> list[Action]:
        """Leave the round."""
        return self._tell(Withdrew(reason), now)

    def _tell(self, event: Event, now: float) -> list[Action]:
        return self._gate(self.machine.handle(event, now))

    def _beat(self, now: float) -> list[Action]:
        """See who lives, and say that this member does; again sooner than usual if somebody falls silent sooner."""
        actions: list[Action] = []
        for member, count in self._received.items():
            if self._detector.received(member, count, now):
                actions += self._tell(PeerReturned(member), now)
            if count:
                actions += self._tell(BytesReceived(member, count), now)
        self._received = dict.fromkeys(self.others, 0)
        for member in self._detector.check(now):
            actions += self._tell(PeerLost(member, SILENT), now)
        if self.machine.needed:
            actions += self._gate([Send(member, wire.Heartbeat()) for member in self.others])
        self._beats_at = min(now + HEARTBEAT_SECONDS, self._detector.deadline)
        return actions

    def _gate(self, actions: list[Action]) -> list[Action]:
        """What may leave now; the rest is kept until its member is heard."""
        passed: list[Action] = []
        for action in actions:
            match action:
                case SendContribution(to, _) | SendMean(to, _, _) if to in self._unheard:
                    self._unheard[to].append(action)
                case Send(to, _) if to in self._undialled:
                    if action not in self._unheard[to]:
                        self._unheard[to].append(action)
                case _:
                    passed.append(action)
        return passed
