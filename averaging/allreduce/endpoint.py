"""One member's end of a round. It takes events and returns actions.

The endpoint joins three things: the round machine, the failure detector, and the rule of what may be sent when.

The member sends a heartbeat every `HEARTBEAT_SECONDS` until all living members hold the mean. From then on it answers
the heartbeats of members that do not know that yet, and waits for nobody. Until then the failure detector tells the
machine which members have fallen silent. A beat that comes late shows that this process itself stood still: nobody is
blamed for that time.

The endpoint keeps values back until the receiving member has sent a frame of this round. That frame proves that the
receiver knows the round by the same manifest and has buffers for it. The endpoint also keeps control messages back from
a member that cannot be dialled, until that member has dialled this one. A message sent earlier would fail, and the
member would look dead.
"""

from __future__ import annotations

from equipoise.averaging.allreduce import events
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import Action, Event, Group
from equipoise.averaging.allreduce.failure_detector import FailureDetector
from equipoise.averaging.allreduce.machine import AllReduce
from equipoise.averaging.allreduce.paxos import members_of
from equipoise.averaging.timing import HEARTBEAT_SECONDS, SILENCE_SECONDS


class Endpoint:
    """One member's end of a round; its arguments are those of `AllReduce`.

    Attributes:
        machine: The round machine, which decides the round's result.
        others: Indices of the members that this member can reach.
    """

    def __init__(self, group: Group, me: int, now: float, timeout: float) -> None:
        self.machine = AllReduce(group, me, now, timeout)
        self._dialable = group.dialable
        self.others = tuple(members_of(self.machine.peers))
        self._detector = FailureDetector(self.others, now)
        self._unheard: dict[int, list[Action]] = {member: [] for member in self.others}
        self._received = dict.fromkeys(self.others, 0)
        self._beats_at = now

    @property
    def deadline(self) -> float:
        """When `Woke` is due, in monotonic seconds; infinite once the round is closed."""
        machine = self.machine
        return machine.deadline if machine.released else min(machine.deadline, self._beats_at)

    def start(self, now: float) -> list[Action]:
        """Return the first actions: a heartbeat for every member, then the machine's first actions."""
        return self._beat(now) + self._gate(self.machine.start(now))

    def heard(self, member: int, now: float) -> list[Action]:
        """Note that a member has sent a frame of this round; return the actions that were kept back for it."""
        returned = self._detector.heard(member, now)
        if not returned and member not in self._unheard:
            return []
        actions = self._tell(events.PeerReturned(member), now) if returned else []
        return actions + self._unheard.pop(member, [])

    def received(self, member: int, count: int) -> None:
        """Count bytes that have come in from a member, partial frames included. The driver calls this before `Woke`."""
        self._received[member] += count

    def allow(self, member: int, rtt: float) -> None:
        """Note the round-trip time to a member, in seconds: a member that is far away may be silent for longer."""
        self._detector.allow(member, rtt)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; return the actions in order. `heard` and `received` take frames and byte counts."""
        match event:
            case events.PeerLost(member):
                self._detector.lose(member)
            case events.Woke():
                actions: list[Action] = []
                if not self.machine.released and now >= self._beats_at:
                    if now - self._beats_at > SILENCE_SECONDS / 2:
                        self.machine.excuse(now - self._beats_at, now)
                    actions = self._beat(now)
                return actions + (self._tell(event, now) if now >= self.machine.deadline else [])
        return self._tell(event, now)

    def _tell(self, event: Event, now: float) -> list[Action]:
        return self._gate(self.machine.handle(event, now))

    def _beat(self, now: float) -> list[Action]:
        """Report silent members to the machine and send heartbeats. The next beat comes before anybody falls silent."""
        actions: list[Action] = []
        for member, count in self._received.items():
            if self._detector.received(member, count):
                actions += self._tell(events.PeerReturned(member), now)
            if count:
                actions += self._tell(events.BytesReceived(member, count), now)
        self._received = dict.fromkeys(self.others, 0)
        for member in self._detector.check(now):
            actions += self._tell(events.PeerLost(member, "silent: no sign of life", silent=True), now)
        if not self.machine.released:
            actions += self._gate([events.Send(member, wire.Heartbeat()) for member in self.others])
        self._beats_at = min(now + HEARTBEAT_SECONDS, self._detector.deadline)
        return actions

    def _gate(self, actions: list[Action]) -> list[Action]:
        """Return the actions that may be performed now; keep the others until their member is heard."""
        if not self._unheard:
            return actions
        passed: list[Action] = []
        for action in actions:
            match action:
                case events.SendContribution(to, _) | events.SendMean(to, _, _) if to in self._unheard:
                    self._unheard[to].append(action)
                case events.Send(to, _) if to in self._unheard and not self._dialable >> to & 1:
                    if action not in self._unheard[to]:  # A heartbeat waits once.
                        self._unheard[to].append(action)
                case _:
                    passed.append(action)
        return passed
