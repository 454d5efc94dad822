"""The bytes of one round at one member: encoded contributions, encoded means, and the arithmetic between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from equipoise.averaging.aio.buffer_pool import BufferPool
from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.layout import Layout, Vectors
from equipoise.averaging.rules import Mean, Rule, RuleError
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.compression import CodecError, NonFiniteError
from equipoise.compression.device_reduce import DeviceReducer
from equipoise.compression.late_torch import torch

VALUE_BYTES = 4
"""Bytes of a value in scratch memory, f32."""


LEEWAY = 1.01
"""Most of the norm of a member's parts, in norms that it signed: kernels round sums of squares in their own ways."""


class Reduction(NamedTuple):
    """A part's mean, encoded, its BLAKE3, and how many values were clamped on the way."""

    mean: memoryview
    digest: bytes
    clamped: int


class RoundBuffers:
    """Keeps what arrived, checks what leaves, reduces, and joins the result.

    Whatever is kept stays in the buffer that it came in, which is of one frame and nobody writes to any more.

    Args:
        me: This member's index.
        vectors: This member's contribution, and the memory for the mean.
        reducer: Computes means on a device; without one, and for other rules than the mean, a CPU does.
    """

    def __init__(
        self,
        group: Group,
        me: int,
        layout: Layout,
        vectors: Vectors,
        pool: BufferPool,
        rule: Rule,
        reducer: DeviceReducer | None = None,
    ) -> None:
        self.clamped = vectors.clamped
        self._pool = pool
        self._rule = rule
        self.reducer = reducer
        self._group = group
        self.me = me
        self._vectors = vectors
        self._layout = layout
        self._places = [layout.encoded(part.start, part.stop) for part in group.parts]
        self._counts = [part.size for part in group.parts]
        self._codecs = [layout.codec_of(part) for part in group.parts]
        self._squares = [0.0] * group.size
        self._kept: list[dict[int, memoryview]] = [{} for _ in group.parts]
        self._shares: tuple[int, dict[int, float]] = (0, {})
        self._means: dict[int, tuple[int, memoryview]] = {}

    def size(self, part: int) -> int:
        """Bytes of an encoded contribution to `part`."""
        return int(self._places[part].stop - self._places[part].start)

    def mean_size(self, part: int, contributors: int) -> int:
        """Bytes of the encoded mean of `part` over `contributors`."""
        return self._codecs[part].mean_size(self._counts[part], len(self._shares_of(contributors)))

    def contribution(self, part: int) -> memoryview:
        """This member's encoded contribution to `part`, checked as if it came from a stranger.

        Raises:
            CodecError: It does not decode to finite values.
        """
        payload = self._pool.take(self.size(part))
        self._read_own(part, payload)
        return payload

    def keep_contribution(self, part: int, member: int, payload: memoryview) -> None:
        """Keep another member's contribution until the round is over: a later decision may need it again.

        Raises:
            CodecError: It does not decode to finite values, or to larger ones than its sender signed.
        """
        codec, count = self._codecs[part], self._counts[part]
        if self._group.norm_cap == math.inf:
            codec.check(payload, count)
        else:
            squares = codec.squares(payload, count)
            if squares < 0:
                codec.check(payload, count)
            self._squares[member] += abs(squares)
            if not self._squares[member] <= (LEEWAY * self._group.norms[member]) ** 2:
                raise CodecError(
                    f"expected a norm of {self._group.norms[member]:g} in all, as it signed, got more"
                )
        self._kept[part][member] = payload

    def keep_mean(self, part: int, contributors: int, payload: memoryview) -> bytes:
        """Keep a mean that came from its owner; returns its BLAKE3.

        Raises:
            CodecError: It does not decode to finite values, or is no mean of so many contributors.
        """
        self._codecs[part].check_mean(payload, self._counts[part], len(self._shares_of(contributors)))
        self._keep(part, contributors, payload)
        return blake3(payload).digest()

    def mean(self, part: int, contributors: int) -> memoryview | None:
        """The kept mean of `part`, if it is over `contributors`."""
        over, payload = self._means.get(part, (0, None))
        return payload if over == contributors else None

    def means(self) -> tuple[memoryview, ...]:
        """The kept means of all parts, encoded, in order; of a round that has succeeded."""
        return tuple(self._means[part][1] for part in range(len(self._group.parts)))

    def reduction(self, part: int, contributors: int) -> Callable[[], Reduction]:
        """Return the job that applies the rule to the contributions to `part`, and encodes the mean.

        The job may run in a thread: it holds all buffers that it uses. It raises `CodecError` if this peer's own
        contribution does not decode to finite values, and `RuleError` if the rule gives no result.

        The owner decodes each contribution from its encoded form, its own too, so all owners get the same bytes. For
        the mean the codec does all in one pass: in fp32, in member order, times the share of the weight. Other
        rules may ignore weights, so they do not get the zeros of contributors that only attend.
        """
        weights = self._shares_of(contributors)
        mean, own = map(self._pool.take, (self.mean_size(part, contributors), self.size(part)))
        kept = self._kept[part]
        payloads = {member: own if member == self.me else kept[member] for member in weights}
        scratch = np.frombuffer(self._pool.take(self._counts[part] * VALUE_BYTES), np.float32)
        given = list(payloads.values()), list(weights.values())
        codec, reducer, is_mean = self._codecs[part], self.reducer, isinstance(self._rule, Mean)

        def job() -> Reduction:
            if self.me in weights:
                self._read_own(part, own)
            if not is_mean:
                clamped = self._apply_rule(part, payloads, weights, mean)
            elif reducer is None:
                clamped = codec.reduce(*given, mean, scratch)
            else:
                clamped = reducer.reduce(codec, *given, scratch, mean)
            return Reduction(mean, blake3(mean).digest(), clamped)

        return job

    def keep_reduction(self, part: int, contributors: int, reduction: Reduction) -> None:
        """Keep the result of a job."""
        self._keep(part, contributors, reduction.mean)
        self.clamped += reduction.clamped

    def apart(self) -> tuple[float, float]:
        """The 2-norms of this member's contribution less the mean, and of the mean; of a round that has succeeded."""
        squares, scratch = np.zeros(2), np.empty((2, max(self._counts)), np.float32)
        for part, (over, payload) in self._means.items():
            own, mean = scratch[:, : self._counts[part]]
            self._codecs[part].decode(self.contribution(part), own)
            self._codecs[part].decode_mean(payload, list(self._shares_of(over).values()), mean)
            own -= mean
            squares += own.dot(own), mean.dot(mean)
        apart, norm = np.sqrt(squares).tolist()
        return apart, norm

    def _keep(self, part: int, contributors: int, payload: memoryview) -> None:
        self._means[part] = (contributors, payload)
        givers = len(self._shares_of(contributors))
        self._layout.put_mean(self._group.parts[part], givers, payload, self._vectors.mean)

    def _read_own(self, part: int, payload: memoryview) -> None:
        # It is copied before it is checked: the script may write to its memory at any time.
        payload[:] = self._vectors.contribution[self._places[part]]
        self._codecs[part].check(payload, self._counts[part])

    def _apply_rule(
        self, part: int, payloads: Mapping[int, memoryview], weights: Mapping[int, float], mean: memoryview
    ) -> int:
        """Encode the rule's result. A rule may be another package's: its errors end the round and nothing else.

        Raises:
            RuleError: The rule raised an error, or returned no finite vector as long as the rows.
        """
        codec, rule = self._codecs[part], self._rule
        trained = [member for member in payloads if self._group.weights[member] > ATTENDANCE_LIMIT]
        trained = trained or list(payloads)
        rows = torch.empty(len(trained), self._counts[part], dtype=torch.float32, device="cpu")
        for row, member in zip(rows, trained, strict=True):
            codec.decode(payloads[member], row)
        shares = torch.tensor([weights[member] for member in trained], dtype=torch.float64, device="cpu")
        try:
            values = rule.reduce(rows, shares).values
            if values.shape != rows[0].shape or values.dtype != rows.dtype:
                raise RuleError(
                    f"the rule {rule.spec} returned {values.dtype} {list(values.shape)}, "
                    f"expected {rows.dtype} {list(rows[0].shape)}"
                )
            return codec.encode(values, mean)
        except RuleError:
            raise
        except NonFiniteError as error:
            raise RuleError(f"the rule {rule.spec} returned {error.value}") from None
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise RuleError(f"the rule {rule.spec} failed: {told}") from error

    def _shares_of(self, contributors: int) -> dict[int, float]:
        """Member -> its share of the weight; mostly asked of the same contributors for part after part."""
        over, shares = self._shares
        if over != contributors:
            shares = self._group.shares(contributors)
            self._shares = (contributors, shares)
        return shares

    def release(self) -> None:
        """Let go of all bytes."""
        for kept in self._kept:
            kept.clear()
        self._means.clear()
