"""Reports of the demo's trainers, one JSON line each, and the demo's result: whether it really worked."""

from __future__ import annotations

from statistics import fmean

import msgspec

from equipoise.peer.demo.options import DemoOptions

MIN_GAIN = 0.01
"""Least gain in accuracy over a peer alone: above the noise of 898 images. It is .025 to .045 where few are killed."""


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round succeeded, and the trainer made an update with its mean.

    Attributes:
        update: Number of the update, from 1.
        group: Number of members of the group.
        contributors: Number of those whose gradients are in the mean.
        loss: Mean loss of the trainer's own samples since the update before.
        bytes_sent: Bytes that its daemon sent.
        bytes_saved: Fewer bytes than the values take in fp32; headers count against the codec.
        seconds: Duration of the round with its matchmaking.
        drawn: Number of peers drawn to train, in a federated round.
        accuracy: Of the model from which a federated round began, as all peers agreed on it; None if none told.
    """

    update: int
    group: int
    contributors: int
    loss: float
    bytes_sent: int
    bytes_saved: int
    seconds: float
    drawn: int = 0
    accuracy: float | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round failed, nothing was changed, and the trainer tries again."""

    update: int
    reason: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has made all its updates.

    Attributes:
        digest: BLAKE3 in hex of its parameters; in federated rounds, of all that peers hold alike.
        accuracy: On the test images, 0 to 1.
        alone: The accuracy of the same network after as much training on its own samples alone.
    """

    digest: str
    accuracy: float
    alone: float


Report = Stepped | Failed | Finished


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result; `equipoise demo --json` prints it.

    Attributes:
        ok: Whether it really worked: `problems` is empty.
        problems: Failures, one line each.
        peers: Daemons started.
        killed: Daemons killed half-way.
        rounds: Updates that every surviving trainer has made.
        failed_rounds: Attempts that failed, changed nothing and were made again.
        accuracy: Of the swarm's model on the test images, 0 to 1; 0 where none has finished.
        accuracy_alone: Mean over the survivors of a peer's accuracy alone with its share.
        bit_identical: Whether all surviving trainers ended with the same parameters, bit for bit.
        bytes_sent: By all daemons in rounds that succeeded.
        bytes_saved: Fewer bytes than the values take in fp32; headers count against the codec.
        seconds: Duration of the whole demo.
        curve: (rounds made, accuracy) of the model of federated rounds.
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
    curve: tuple[tuple[int, float], ...] = ()


class Ledger:
    """Collects the trainers' reports, by trainer index."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._updates: dict[int, int] = {}
        self._failed = 0
        self._sent = self._saved = 0
        self._curve: dict[int, float] = {}
        self.finished: dict[int, Finished] = {}

    def add(self, trainer: int, report: Report) -> bool:
        """Take in a report; returns whether it is the first one of its update."""
        match report:
            case Finished():
                self.finished[trainer] = report
            case Failed():
                self._failed += 1
            case Stepped(update=update):
                if report.accuracy is not None:
                    self._curve[update - 1] = report.accuracy
                first = update > max(self._updates.values(), default=0)
                self._updates[trainer] = update
                self._sent += report.bytes_sent
                self._saved += report.bytes_saved
                return first
        return False

    def updates(self, trainer: int) -> int:
        """Return the updates of `trainer`. A trainer that missed a round made that update later, unreported."""
        return self._options.rounds if trainer in self.finished else self._updates.get(trainer, 0)

    def summarize(self, killed: frozenset[int], problems: list[str], seconds: float) -> Summary:
        """The result, given which trainers' daemons were killed and what went wrong besides."""
        options = self._options
        survivors = [index for index in range(options.peers) if index not in killed]
        done = [self.finished[index] for index in survivors if index in self.finished]
        accuracy = fmean(report.accuracy for report in done) if done else 0.0
        alone = fmean(report.alone for report in done) if done else 0.0
        if done and self._curve:
            self._curve[options.rounds] = accuracy
        digests = {report.digest for report in done}
        found = list(problems)
        for index in survivors:
            if index not in self.finished:
                found.append(f"trainer {index + 1} made {self.updates(index)} of {options.rounds} updates")
        if len(killed) != options.kill:
            found.append(f"{len(killed)} of {options.kill} daemons were killed")
        if len(digests) > 1:
            found.append("the survivors' parameters differ")
        if done and accuracy - alone < MIN_GAIN:
            found.append(
                f"the swarm's accuracy is only {100 * (accuracy - alone):+.1f} points above a peer alone, "
                f"expected {100 * MIN_GAIN:+.1f}; more --rounds help"
            )
        return Summary(
            ok=not found,
            problems=tuple(found),
            peers=options.peers,
            killed=len(killed),
            rounds=min(map(self.updates, survivors), default=0),
            failed_rounds=self._failed,
            accuracy=accuracy,
            accuracy_alone=alone,
            bit_identical=len(done) == len(survivors) and len(digests) == 1,
            bytes_sent=self._sent,
            bytes_saved=self._saved,
            seconds=seconds,
            curve=tuple(sorted(self._curve.items())),
        )
