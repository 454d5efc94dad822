"""One machine of a round, and the others played by hand: events in, actions out."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import (
    Action,
    ContributionReceived,
    Event,
    Fail,
    Finish,
    Group,
    MeanReceived,
    MessageReceived,
    PartReduced,
    PeerLost,
    Send,
    Woke,
)
from equipoise.averaging.allreduce.machine import AllReduce
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.partition import Part

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
        dialable: int | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        parts = tuple(Part(at, at + 1, owner) for at, owner in enumerate(owners))
        everyone = (1 << len(weights)) - 1
        self.group = Group(
            round_id=bytes(16),
            names=tuple("abcdefgh"[: len(weights)]),
            weights=tuple(weights),
            dialable=everyone if dialable is None else dialable,
            parts=parts,
            first_leader=A,
        )
        self.now = 0.0
        self.machine = AllReduce(self.group, me, 0.0, timeout)
        self.first = self.machine.start(0.0)

    def tell(self, *events: Event) -> list[Action]:
        return [action for event in events for action in self.machine.handle(event, self.now)]

    def says(self, sender: int, *messages: wire.RoundMessage) -> list[Action]:
        return self.tell(*(MessageReceived(sender, message) for message in messages))

    def contributes(self, sender: int, *parts: int) -> list[Action]:
        return self.tell(*(ContributionReceived(sender, part) for part in parts or (0,)))

    def mean(
        self, over: int, part: int = 0, digest: bytes = DIGEST, sender: int | None = None
    ) -> list[Action]:
        """From the part's owner, unless another sender is named."""
        owner = self.machine._ledger.owner_of[part]
        return self.tell(MeanReceived(owner if sender is None else sender, part, over, digest))

    def reduced(self, over: int, part: int = 0, digest: bytes = DIGEST) -> list[Action]:
        return self.tell(PartReduced(part, over, digest))

    def lose(self, *members: int) -> list[Action]:
        return self.tell(*(PeerLost(member, "connection broke") for member in members))

    def stall(self, times: int = 1) -> list[Action]:
        actions: list[Action] = []
        for _ in range(times):
            self.now = self.machine.deadline
            actions += self.tell(Woke())
        return actions

    def wake(self) -> list[Action]:
        return self.tell(Woke())

    def digest(self, decision: Decision) -> bytes:
        """Of the mean that this machine holds."""
        return self.machine._ledger.digest(decision)

    def vote(self, decision: Decision, ballot: int = 0, digest: bytes | None = None) -> wire.Held:
        return wire.Held(ballot, decision, digest or self.digest(decision))


def sent(actions: list[Action], kind: type[wire.RoundMessage]) -> list[tuple[int, wire.RoundMessage]]:
    return [
        (one.to, one.message) for one in actions if isinstance(one, Send) and isinstance(one.message, kind)
    ]


def recipients(actions: list[Action], kind: type[wire.RoundMessage]) -> list[int]:
    return [to for to, _ in sent(actions, kind)]


def ends(actions: list[Action]) -> list[Action]:
    return [one for one in actions if isinstance(one, Finish | Fail)]


def finished(me: int, **options) -> Table:
    """A member that has finished over all three, while it is not known whether C holds the mean."""
    table = Table(me, **options)
    decision = Decision(ALL, table.group.dialable)
    if me != A:
        table.says(A, wire.Propose(0, decision))
        for part in range(len(table.group.parts)):
            table.mean(ALL, part)
        table.says(A, table.vote(decision))
    assert isinstance(table.machine.ended, Finish)
    return table
