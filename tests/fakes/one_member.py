"""One machine of a round, and the others played by hand: events in, actions out."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.averaging.allreduce import events
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.machine import AllReduce
from equipoise.averaging.allreduce.messages import Decision
from simulator.scenario import group_of

A, B, C, D, E = range(5)
ALL = 0b111
DIGEST, OTHER_DIGEST = b"d" * 32, b"o" * 32
TIMEOUT = 30.0


class Table:
    """One machine of a group; every call returns what it asked for."""

    def __init__(
        self,
        me: int,
        *,
        owners: Sequence[int] = (A,),
        weights: Sequence[float] = (1, 1, 1),
        dialable: int = -1,
        timeout: float = TIMEOUT,
    ) -> None:
        self.group = group_of(owners, weights, dialable)
        self.now = 0.0
        self.machine = AllReduce(self.group, me, 0.0, timeout)
        self.first = self.machine.start(0.0)

    def tell(self, *told: events.Event) -> list[events.Action]:
        return [action for event in told for action in self.machine.handle(event, self.now)]

    def says(self, sender: int, *messages: wire.RoundMessage) -> list[events.Action]:
        return self.tell(*(events.MessageReceived(sender, message) for message in messages))

    def votes(self, sender: int, vote: wire.Vote) -> list[events.Action]:
        """A member casts its own vote."""
        return self.says(sender, wire.Votes(vote, 1 << sender))

    def contributes(self, sender: int, *parts: int) -> list[events.Action]:
        return self.tell(*(events.ContributionReceived(sender, part) for part in parts or (0,)))

    def mean(
        self, over: int, part: int = 0, digest: bytes = DIGEST, sender: int | None = None
    ) -> list[events.Action]:
        """From the part's owner, unless another sender is named."""
        owner = self.machine._part_table.owner_of[part]
        return self.tell(events.MeanReceived(owner if sender is None else sender, part, over, digest))

    def reduced(self, over: int, part: int = 0, digest: bytes = DIGEST) -> list[events.Action]:
        return self.tell(events.PartReduced(part, over, digest))

    def lose(self, *members: int) -> list[events.Action]:
        return self.tell(*(events.PeerLost(member, "connection broke") for member in members))

    def stall(self, times: int = 1) -> list[events.Action]:
        actions: list[events.Action] = []
        for _ in range(times):
            self.now = self.machine.deadline
            actions += self.tell(events.Woke())
        return actions

    def wake(self) -> list[events.Action]:
        return self.tell(events.Woke())

    def digest(self, decision: Decision) -> bytes:
        """Of the mean that this machine holds."""
        return self.machine._part_table.means.digest(decision)

    def vote(self, decision: Decision, ballot: int = 0, digest: bytes | None = None) -> wire.Vote:
        return wire.Vote(ballot, decision, digest or self.digest(decision))


def sent(actions: list[events.Action], kind: type[wire.RoundMessage]) -> list[tuple[int, wire.RoundMessage]]:
    return [
        (action.to, action.message)
        for action in actions
        if isinstance(action, events.Send) and isinstance(action.message, kind)
    ]


def recipients(actions: list[events.Action], kind: type[wire.RoundMessage]) -> list[int]:
    return [to for to, _ in sent(actions, kind)]


def voters(actions: list[events.Action]) -> dict[int, int]:
    """Whose votes were sent to whom: a bitmask by member."""
    return {
        to: message.voters for to, message in sent(actions, wire.Votes) if isinstance(message, wire.Votes)
    }


def ends(actions: list[events.Action]) -> list[events.Action]:
    return [action for action in actions if isinstance(action, events.Finish | events.Fail)]


def finished(me: int, **options) -> Table:
    """A member that has finished over all three, while it is not known whether C holds the mean."""
    table = Table(me, **options)
    decision = Decision(ALL, table.group.dialable)
    if me != A:
        table.says(A, wire.Propose(0, decision))
        for part in range(len(table.group.parts)):
            table.mean(ALL, part)
        table.votes(A, table.vote(decision))
    assert isinstance(table.machine.ended, events.Finish)
    return table
