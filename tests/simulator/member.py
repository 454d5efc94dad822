"""A round's machine with the bytes around it, as the asyncio driver keeps them, and a check of every action.

No clock and no network: what comes in is a call, what goes out is returned. The explorer and the virtual-time world
both drive members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from equipoise.averaging.allreduce import events
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.endpoint import Endpoint
from equipoise.averaging.allreduce.machine import AllReduce
from equipoise.averaging.allreduce.paxos import members_of
from equipoise.averaging.allreduce.vote_signatures import VoteSignatures
from simulator.arithmetic import encode, exact_mean, mean
from simulator.core import Violation

Values = tuple[float, ...]


@dataclass(frozen=True)
class Signer:
    """An identity that anybody could forge: nobody does."""

    peer: str

    def sign(self, data: bytes) -> bytes:
        """Sign as this peer."""
        return hashlib.sha256(self.peer.encode() + data).digest()

    def role(self, peer: str) -> str:
        """Everybody trains."""
        return "trainer"

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        """Whether `peer` signed this."""
        return signature == Signer(peer).sign(data)


@dataclass(frozen=True, slots=True)
class Frame:
    """A message on its way, with its body."""

    sender: int
    to: int
    message: wire.RoundMessage
    body: bytes = b""

    @property
    def bulk(self) -> bool:
        """Whether it carries values: control frames overtake those."""
        return bool(self.body)


@dataclass(frozen=True, slots=True)
class Job:
    """A reduction that the driver does on the side."""

    part: int
    contributors: int


Output = Frame | Job


class Member:
    """One member of a simulated round.

    Args:
        group: The round.
        index: This member.
        values: Its contribution, as many values as the parts cover.
        now: Seconds, by this member's clock.
        timeout: Seconds.
        bare: Whether it is the machine alone, which is told who is lost; else it has signs of life, and a clock.

    Attributes:
        endpoint: What it drives: the machine, or that with all of `endpoint.Endpoint` around it.
        vote_signatures: Signs and checks what is said of votes.
        ended: How it ended, if it has.
        result: The encoded mean, once it has finished; None before, and for ever if it failed.
    """

    def __init__(
        self,
        group: events.Group,
        index: int,
        values: Values,
        now: float,
        timeout: float,
        bare: bool = True,
    ) -> None:
        self.group = group
        self.index = index
        self.values = values
        self.endpoint = (AllReduce if bare else Endpoint)(group, index, now, timeout)
        signer = Signer(group.names[index])
        self.vote_signatures = VoteSignatures(group.round_id, index, group.names, signer)
        self.ended: events.Finish | events.Fail | None = None
        self.closed = False
        self.result: bytes | None = None
        self._released = False
        self._contributions: dict[tuple[int, int], bytes] = {}
        self._means: dict[int, tuple[int, bytes]] = {}

    @property
    def machine(self) -> AllReduce:
        """The round machine."""
        return self.endpoint.machine if isinstance(self.endpoint, Endpoint) else self.endpoint

    def start(self, now: float) -> list[Output]:
        """Begin; returns what leaves."""
        return self._perform(self.endpoint.start(now))

    def tell(self, event: events.Event, now: float) -> list[Output]:
        """An event that is no frame."""
        return self._perform(self.endpoint.handle(event, now))

    def heard(self, sender: int, now: float) -> list[Output]:
        """A frame has come from a member: what waited for that leaves, but for what is out of date."""
        assert isinstance(self.endpoint, Endpoint)
        actions = self.endpoint.heard(sender, now)
        return self._perform(one for one in actions if not self._is_stale(one))

    def receive(self, frame: Frame, now: float) -> list[Output]:
        """A frame has come."""
        match frame.message:
            case wire.Heartbeat(asks) if not (asks and self.machine.released):
                return []
            case wire.Contribution(part):
                if not self.machine.wants_contribution(frame.sender, part):
                    return []
                self._contributions[part, frame.sender] = frame.body
                return self.tell(events.ContributionReceived(frame.sender, part), now)
            case wire.Mean(part, contributors):
                if not self.machine.wants_mean(frame.sender, part, contributors):
                    return []
                digest = self._keep(part, contributors, frame.body)
                return self.tell(events.MeanReceived(frame.sender, part, contributors, digest), now)
            case message:
                checked = self.vote_signatures.check(frame.sender, message)
                return self.tell(events.MessageReceived(frame.sender, checked), now)

    def reduced(self, job: Job, now: float) -> list[Output]:
        """A reduction is done; its result replaces what is kept only where it is still wanted."""
        if self.closed or not self.machine.wants_mean(self.index, job.part, job.contributors):
            return []
        counted = self.group.counted(job.contributors)
        weighted = [
            (counted[member], self._contribution(job.part, member)) for member in members_of(job.contributors)
        ]
        digest = self._keep(job.part, job.contributors, mean(weighted))
        return self.tell(events.PartReduced(job.part, job.contributors, digest), now)

    def _keep(self, part: int, contributors: int, body: bytes) -> bytes:
        self._means[part] = (contributors, body)
        return hashlib.sha256(body).digest()

    def _perform(self, actions: Iterable[events.Action]) -> list[Output]:
        outputs: list[Output] = []
        for action in actions:
            self._require(not self.closed, "nothing is asked for after Close", action)
            match action:
                case events.Send(to, message):
                    outputs.append(Frame(self.index, to, self.vote_signatures.seal(message)))
                case events.SendContribution(to, part):
                    body = self._contribution(part, self.index)
                    outputs.append(Frame(self.index, to, wire.Contribution(part), body))
                case events.SendMean(to, part, contributors):
                    outputs.append(Frame(self.index, to, wire.Mean(part, contributors), self._mean(action)))
                case events.Reduce(part, contributors):
                    self._check_reduce(action)
                    outputs.append(Job(part, contributors))
                case events.Finish() | events.Fail():
                    self._end(action)
                case events.Release():
                    self._require(self.ended is not None, "buffers are kept until the end", action)
                    self._released = True
                case events.Close():
                    self._require(self.ended is not None, "a round ends before it is forgotten", action)
                    self.closed = True
        return outputs

    def keeps(self, frame: Frame) -> bool:
        """Whether it could make a frame with values again, or for the first time."""
        match frame.message:
            case wire.Mean(part, contributors):
                return not self._released and self._means.get(part, (0, b""))[0] == contributors
            case wire.Contribution():
                return self.ended is None
        return True

    def _is_stale(self, action: events.Action) -> bool:
        """Whether it asks for a mean that has been replaced or released while it waited."""
        return isinstance(action, events.SendMean) and (
            self._released or self._means.get(action.part, (0, b""))[0] != action.contributors
        )

    def _contribution(self, part: int, member: int) -> bytes:
        if member == self.index:
            where = self.group.parts[part]
            return encode(self.values[where.start : where.stop])
        return self._contributions[part, member]

    def _mean(self, action: events.SendMean) -> bytes:
        over, body = self._means.get(action.part, (0, b""))
        self._require(not self._released, "nothing is sent after Release", action)
        self._require(over == action.contributors, f"the mean kept is over {over:b}", action)
        return body

    def _check_reduce(self, action: events.Reduce) -> None:
        missing = [
            member
            for member in members_of(action.contributors)
            if member != self.index and (action.part, member) not in self._contributions
        ]
        self._require(not missing, f"the contributions of {missing} are not here", action)
        unwanted = self.machine.ended is None and not self.machine.wants_mean(
            self.index, action.part, action.contributors
        )
        self._require(not unwanted, "nobody wants this mean", action)

    def _end(self, end: events.Finish | events.Fail) -> None:
        self._require(self.ended is None, "a round ends once", end)
        self.ended = end
        if isinstance(end, events.Finish):
            over = end.decision.contributors
            for part in range(len(self.group.parts)):
                kept = self._means.get(part, (0, b""))[0]
                self._require(kept == over, f"part {part} is over {kept:b}", end)
            self.result = b"".join(self._means[part][1] for part in range(len(self.group.parts)))

    def _require(self, holds: bool, promise: str, action: events.Action) -> None:
        if not holds:
            raise Violation(f"{self.group.names[self.index]}: {promise}, yet {action}")


def check_agreement(members: Sequence[Member], exact: bool = True) -> None:
    """Check what a round promises of the members that have finished: one mean, and the right one.

    Args:
        members: All members of the round, the dead included, in order.
        exact: Whether the mean must be that of the contributions; else only equal on all.

    Raises:
        Violation: Two differ, or the mean is not that of the named contributors.
    """
    ends = {
        (member.ended.decision.contributors, member.ended.digest, member.result)
        for member in members
        if isinstance(member.ended, events.Finish)
    }
    if len(ends) > 1:
        raise Violation(
            f"members that report ok differ: {sorted((f'{over:b}', digest.hex()[:8]) for over, digest, _ in ends)}"
        )
    for contributors, _, result in ends:
        counted = [members[index] for index in members_of(contributors)]
        weights = members[0].group.counted(contributors)
        weighted = [(weights[member.index], member.values) for member in counted]
        if len(counted) < members[0].group.quorum or any(weight == 0 for weight, _ in weighted):
            raise Violation(f"a mean over {contributors:b}")
        if exact and result != encode(exact_mean(weighted)):
            raise Violation(f"the result is not the mean over {contributors:b}")
