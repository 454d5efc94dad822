"""What trainers tell the demo, one JSON line each; what the demo came to, and whether it really worked."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from equipoise.peer.demo.options import DemoOptions

MIN_GAIN = 0.01
"""Least gain in accuracy over a peer alone: above the noise of 898 images. It is .025 to .045 where few are killed."""

FP32_BYTES = 4


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round succeeded, and the trainer made an update with its mean.

    Attributes:
        update: Which update this was, from 1.
        group: Number of members of the group.
        contributors: Number of those whose gradients are in the mean.
        loss: Mean loss of the trainer's own samples since the update before.
        bytes_sent: Bytes that its daemon sent.
        seconds: Duration of the round with its matchmaking.
    """

    update: int
    group: int
    contributors: int
    loss: float
    bytes_sent: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round failed, nothing was changed, and the trainer tries again."""

    update: int
    reason: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has made all its updates.

    Attributes:
        digest: SHA-256 in hex of its parameters.
        accuracy: On the test images, 0 to 1.
        alone: The accuracy of the same network after as many updates from its own samples alone.
        values: Number of values in the gradient.
    """

    digest: str
    accuracy: float
    alone: float
    values: int


Report = Stepped | Failed | Finished

_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode_report(report: Report) -> str:
    """One line, without its end."""
    return msgspec.json.encode(report).decode()


def decode_report(line: str) -> Report:
    """The inverse of `encode_report`.

    Raises:
        msgspec.DecodeError: The line is no report.
    """
    return _decoder.decode(line)


class Round(msgspec.Struct, kw_only=True):
    """One update of the swarm, from the reports of all trainers that have made it.

    Attributes:
        update: Its number, from 1.
        group: Members of the group.
        contributors: Those whose gradients are in the mean.
        loss: Mean over the reporting trainers.
        bytes_sent: Sum over the reporting trainers.
        seconds: The longest that a trainer took.
        reports: Number of reporting trainers.
    """

    update: int
    group: int = 0
    contributors: int = 0
    loss: float = 0.0
    bytes_sent: int = 0
    seconds: float = 0.0
    reports: int = 0

    def add(self, report: Stepped) -> None:
        """Take in one trainer's report."""
        self.loss = (self.loss * self.reports + report.loss) / (self.reports + 1)
        self.reports += 1
        self.group, self.contributors = report.group, report.contributors
        self.bytes_sent += report.bytes_sent
        self.seconds = max(self.seconds, report.seconds)

    def fp32_bytes(self, values: int) -> int:
        """What the reporting trainers' daemons would have sent of `values` values in fp32, headers apart.

        In a butterfly of n members each value is sent n - 1 times to its owner and n - 1 times back.
        """
        if self.group == 0:
            return 0
        return 2 * (self.group - 1) * values * FP32_BYTES * self.reports // self.group


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result; `equipoise demo --json` prints it.

    Attributes:
        ok: Whether it really worked: `problems` is empty.
        problems: What did not work, one line each.
        peers: Daemons started.
        killed: Daemons killed half-way.
        rounds: Updates that every surviving trainer has made.
        failed_rounds: Attempts that failed, changed nothing and were made again.
        accuracy: Of the swarm's model on the test images, 0 to 1; 0 where none has finished.
        accuracy_alone: Mean over the survivors of a peer's accuracy alone with its share.
        bit_identical: Whether all surviving trainers ended with the same parameters, bit for bit.
        bytes_sent: By all daemons in rounds that succeeded.
        bytes_saved: Fewer bytes than in fp32, headers counted against the codec.
        seconds: Duration of the whole demo.
    """

    ok: bool
    problems: tuple[str, ...]
    peers: int
    killed: int
    rounds: int
    failed_rounds: int
    accuracy: float
    accuracy_alone: float
    bit_identical: bool
    bytes_sent: int
    bytes_saved: int
    seconds: float


class Ledger:
    """Collects the trainers' reports, by trainer index."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._updates: dict[int, int] = {}
        self.rounds: dict[int, Round] = {}
        self.finished: dict[int, Finished] = {}
        self.failures: list[tuple[int, Failed]] = []

    def add(self, trainer: int, report: Report) -> Round | None:
        """Take in a report; returns the round that it changed, if any."""
        if isinstance(report, Finished):
            self.finished[trainer] = report
        elif isinstance(report, Failed):
            self.failures.append((trainer, report))
        else:
            self._updates[trainer] = report.update
            round_ = self.rounds.setdefault(report.update, Round(update=report.update))
            round_.add(report)
            return round_
        return None

    def updates(self, trainer: int) -> int:
        """How many updates `trainer` has made; one that missed a round has made that update later, unreported."""
        return self._options.rounds if trainer in self.finished else self._updates.get(trainer, 0)

    def summarize(self, killed: frozenset[int], problems: list[str], seconds: float) -> Summary:
        """The result, given which trainers' daemons were killed and what went wrong besides."""
        survivors = [index for index in range(self._options.peers) if index not in killed]
        done = {index: self.finished[index] for index in survivors if index in self.finished}
        found = [*problems, *self._problems(survivors, done, len(killed))]
        values = next((report.values for report in done.values()), 0)
        sent = sum(round_.bytes_sent for round_ in self.rounds.values())
        return Summary(
            ok=not found,
            problems=tuple(found),
            peers=self._options.peers,
            killed=len(killed),
            rounds=min(map(self.updates, survivors), default=0),
            failed_rounds=len(self.failures),
            accuracy=_mean([report.accuracy for report in done.values()]),
            accuracy_alone=_mean([report.alone for report in done.values()]),
            bit_identical=len(done) == len(survivors) and len({one.digest for one in done.values()}) == 1,
            bytes_sent=sent,
            bytes_saved=sum(round_.fp32_bytes(values) for round_ in self.rounds.values()) - sent,
            seconds=seconds,
        )

    def _problems(self, survivors: list[int], done: Mapping[int, Finished], killed: int) -> list[str]:
        problems = []
        for index in survivors:
            if index not in done:
                made = self.updates(index)
                problems.append(f"trainer {index + 1} made {made} of {self._options.rounds} updates")
        if killed != self._options.kill:
            problems.append(f"{killed} of {self._options.kill} daemons were killed")
        if done and len({report.digest for report in done.values()}) > 1:
            problems.append("the survivors' parameters differ")
        gain = _mean([report.accuracy for report in done.values()]) - _mean([r.alone for r in done.values()])
        if done and gain < MIN_GAIN:
            problems.append(
                f"the swarm's accuracy is only {100 * gain:+.1f} points above a peer alone, "
                f"expected {100 * MIN_GAIN:+.1f}; more --rounds help"
            )
        return problems


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
