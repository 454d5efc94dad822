"""The history of a federated training, and the rules by which it ends.

What all peers know alike of a round is replicated with the model: it follows from the round's outcome alone. The last
`REPLICATED_ROUNDS` of these records travel to newcomers and into checkpoints. Whether the training ends follows from
them alone, so all peers end after the same round, however many rounds each has seen.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections import UserList
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch

from equipoise.averaging.manifest import PeerName
from equipoise.averaging.metrics import Finite, Name
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import MAX_EPOCH
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.training.image import Tree

REPLICATED_ROUNDS = 1000
"""Most records in a snapshot or a checkpoint. With 64 contributors each takes at most 6 KB, so all of them take a tenth
of what an image may hold beside the model (`image.SPARE_BYTES`)."""

EVERYTHING = (-math.inf, math.inf)
RANGES = {
    **dict.fromkeys(("accuracy", "acc", "auc", "f1", "precision", "recall"), (0.0, 1.0)),
    "loss": (0.0, math.inf),
    "perplexity": (1.0, math.inf),
}
"""The least and the greatest value of well-known metrics: a median beyond it judges nothing."""

Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_EPOCH)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Agreed(msgspec.Struct, frozen=True, array_like=True):
    """The knowledge of a round that all peers have alike."""

    number: Number
    contributors: dict[PeerName, Finite]
    metrics: dict[Name, Finite]
    evaluation: dict[Name, Finite]
    digest: Digest
    medians: dict[Name, tuple[Finite, Finite]] = {}


_records = msgspec.msgpack.Decoder(list[Agreed])


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One round, for this peer.

    All peers hold alike `number`, `contributors`, `metrics`, `evaluation`, `digest` and `medians`. The other fields are
    each peer's own; they are empty for rounds that this peer has from others.

    Attributes:
        number: The round's number, 1 for the first.
        ok: Whether the round came about; a round that failed is tried again, and has its own record only from `step`.
        reason: The reason for the result, one line.
        drawn: PeerIDs of the peers that were drawn to train, by the word of the round's coordinator; of a round that
            failed, as this peer saw it last.
        contributors: PeerID -> counted weight.
        late: Seconds by which this peer's contribution came too late; 0 if it did not.
        metrics: What `fit` returned, averaged over the contributors.
        evaluation: What `evaluate` returned of the model from which the round began, averaged over the members.
        seconds: Time from the beginning of the round here to its end.
        bytes_sent: Bytes of frames sent for the round.
        bytes_received: Bytes of frames received for the round.
        digest: Digest of the round's mean and contributors.
        medians: The lower and the upper median of each number, which `until` and `patience` judge.
    """

    number: int
    ok: bool = True
    reason: str = ""
    drawn: tuple[str, ...] = ()
    contributors: dict[str, float] = {}
    late: float = 0.0
    metrics: dict[str, float] = {}
    evaluation: dict[str, float] = {}
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    digest: str = ""
    medians: dict[str, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        """True if the round is ok."""
        return self.ok

    @classmethod
    def of(cls, number: int, outcome: Outcome) -> Record:
        """The record of a round that ended in a mean."""
        return cls(
            number=number,
            reason=outcome.reason,
            drawn=outcome.drawn,
            contributors={peer: outcome.contributors[peer] for peer in outcome.givers},
            metrics=dict(outcome.metrics),
            evaluation=dict(outcome.evaluation),
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            digest=outcome.digest,
            medians=dict(outcome.medians),
        )

    @property
    def agreed(self) -> Agreed:
        """The part that all peers hold alike."""
        return Agreed(
            self.number,
            dict(sorted(self.contributors.items())),
            dict(sorted(self.metrics.items())),
            dict(sorted(self.evaluation.items())),
            self.digest,
            dict(sorted(self.medians.items())),
        )

    def value(self, name: str) -> float | None:
        """The agreed value of a metric: of the evaluation or else of the training; None without one."""
        return self.evaluation.get(name, self.metrics.get(name))

    def judged(self, until: Until) -> float | None:
        """The less favourable median of a condition's metric; None without one, or beyond the range of the metric.

        A round from an older checkpoint has no medians: its average is judged.
        """
        low, high = self.medians.get(until.name, (self.value(until.name),) * 2)
        value, (least, most) = low if until.mode == "max" else high, RANGES.get(until.name, EVERYTHING)
        # A bound beyond the range shows another unit, such as percent.
        fits = value is None or least <= value <= most or not least <= until.bound <= most
        return value if fits else None


class History(UserList[Record]):
    """The records of the rounds that came about, one after another, oldest first.

    A peer that was there from the first round on has them all. A peer that came later, or began again from a
    checkpoint, has the last `REPLICATED_ROUNDS` before its beginning, and all since. Two histories are equal if the
    agreed parts of all their records are.
    """

    def __eq__(self, other: object) -> bool:
        return self._agreed() == other._agreed() if isinstance(other, History) else self.data == other

    def __repr__(self) -> str:
        return f"<History of {len(self)} rounds>"

    def add(self, record: Record) -> None:
        """Add a record, or replace the one of the same number."""
        at = record.number - self[0].number if self else 0
        self[at : at + 1] = [record]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the records to a file, one JSON object a line.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_bytes(msgspec.json.Encoder().encode_lines(self.data))

    def _agreed(self) -> list[Agreed]:
        return [record.agreed for record in self]

    # ---- as a part of the replicated state ----

    def tree(self) -> Tree:
        """See `Part`: the last agreed parts, as msgpack in a tensor, u8 [bytes]."""
        encoded = msgspec.msgpack.encode(self._agreed()[-REPLICATED_ROUNDS:])
        return {"records": torch.frombuffer(bytearray(encoded), dtype=torch.uint8)}

    def check(self, tree: Tree, foreign: bool = False) -> None:
        """See `Part`."""
        self._decoded(tree)

    def load(self, tree: Tree) -> None:
        """See `Part`; this peer's own fields of rounds that it was in stay, and the rounds before those of the tree."""
        own, found = {record.number: record for record in self}, self._decoded(tree)
        # A record names the state before it, so equal records have the same rounds before them.
        same = bool(found) and found[0].number in own and own[found[0].number].agreed == found[0]
        self[:] = [record for record in self if same and record.number < found[0].number]
        for agreed in found:
            known = own.get(agreed.number)
            fields = msgspec.structs.asdict(agreed)
            self.append(known if known and known.agreed == agreed else Record(**fields))

    @staticmethod
    def _decoded(tree: Tree) -> list[Agreed]:
        encoded = tree.get("records") if isinstance(tree, dict) else None
        if not isinstance(encoded, torch.Tensor) or encoded.dtype != torch.uint8 or encoded.dim() != 1:
            raise ImageError("expected a history's records as bytes, got none")
        try:
            found = _records.decode(encoded.numpy().tobytes())
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ImageError(f"expected a history's records, they do not decode: {error}") from None
        first = found[0].number if found else 1
        if [record.number for record in found] != list(range(first, first + len(found))):
            raise ImageError("expected a history's records in order, they are not")
        if first > 1 and len(found) < REPLICATED_ROUNDS:
            raise ImageError(f"expected a history's records from round 1 on, they begin with round {first}")
        return found


# The spaces around the operator are optional; a metric's name may have inner ones.
_UNTIL = re.compile(r"\A\s*(\S(?:.{0,22}\S)??)\s*(>=|<=|>|<)\s*(\S+)\s*\Z")

_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


class Until(NamedTuple):
    """A condition on one metric."""

    name: str
    operator: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Until:
        """The condition that a text says.

        Raises:
            ValueError: It is no condition.
        """
        found = _UNTIL.match(text) if isinstance(text, str) else None
        with contextlib.suppress(ValueError):
            if found and math.isfinite(bound := float(found[3])):
                return cls(found[1], found[2], bound)
        expected = "NAME >= NUMBER, with >=, <=, > or <, as 'accuracy >= 0.95'"
        raise ValueError(f"until: expected {expected}, got {str(text)[:80]!r}")

    def __str__(self) -> str:
        return f"{self.name} {self.operator} {self.bound!r}"

    @property
    def mode(self) -> Literal["max", "min"]:
        """Whether it asks for more of the metric, or for less."""
        return "max" if self.operator.startswith(">") else "min"

    def holds(self, value: float) -> bool:
        """Whether a value fulfils it."""
        return bool(_COMPARISONS[self.operator](value, self.bound))


class Ending(NamedTuple):
    """The rules by which a training ends.

    Attributes:
        rounds: Rounds after which it ends; None without a limit.
        until: The condition under which it ends.
        patience: Rounds without an improvement of the condition's metric after which it ends, below
            `REPLICATED_ROUNDS`; 0 without a limit.
    """

    rounds: int | None
    until: Until | None
    patience: int

    def reason(self, history: Sequence[Record]) -> str:
        """The reason why a training with this history ends, one line; empty if it goes on.

        The last `REPLICATED_ROUNDS` records decide, which all peers have alike.
        """
        recent = history[-REPLICATED_ROUNDS:]
        if not recent:
            return ""
        last = recent[-1].number
        if self.rounds is not None and last >= self.rounds:
            return f"all {self.rounds} rounds are made"
        if self.until is None:
            return ""
        name = self.until.name
        found = [(record.number, one) for record in recent if (one := record.judged(self.until)) is not None]
        held = [number for number, value in found if self.until.holds(value)]
        for number, value in found:
            if number in held and number - 1 in held:
                return f"{self.until} in rounds {number - 1} and {number}: {value:.6g}"
        if self.patience and found:
            better = max if self.until.mode == "max" else min
            number, value = better(found, key=operator.itemgetter(1))  # The first of equal ones.
            if last - number >= self.patience:
                return f"{name} has not improved for {last - number} rounds: {value:.6g} in round {number}"
        return ""
