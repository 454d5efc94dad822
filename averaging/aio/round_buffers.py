"""The bytes of one round at one member: encoded contributions, encoded means, and the arithmetic between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from blake3 import blake3

from equipoise.averaging.aio.buffer_pool import BufferPool
from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.layout import Layout
from equipoise.averaging.rules import Mean, Rule
from equipoise.compression import Codec, CodecError, EncodeReport, NonFiniteError, Values, unwrapped


class Reduction(NamedTuple):
    """A part's mean, encoded, its BLAKE3, and how many values were clamped on the way."""

    mean: memoryview
    digest: bytes
    clamped: int


class RoundBuffers:
    """Keeps what arrived, encodes what leaves, reduces, and decodes the result.

    Whatever is kept stays in the buffer that it came in, which is of one frame and nobody writes to any more.

    Args:
        group: The round.
        me: This member's index.
        layout: Which codec carries which part.
        contribution: f32 [D], this member's values; read only.
        result: f32 [D], takes the mean, part by part as it comes: undefined until the round has succeeded.
        pool: Lends the memory.
        rule: Makes one vector of the contributions.
    """

    def __init__(
        self,
        group: Group,
        me: int,
        layout: Layout,
        contribution: torch.Tensor,
        result: torch.Tensor,
        pool: BufferPool,
        rule: Rule,
    ) -> None:
        self.clamped = 0
        self._pool = pool
        self._rule = rule
        self._group = group
        self._me = me
        self._contribution = unwrapped(contribution)
        self._result = unwrapped(result)
        self._counts = [part.stop - part.start for part in group.parts]
        self._codecs = [layout.codec_of(part) for part in group.parts]
        self._sizes = [
            codec.encoded_size(count) for codec, count in zip(self._codecs, self._counts, strict=True)
        ]
        self._kept: list[dict[int, memoryview]] = [{} for _ in group.parts]
        self._shares: tuple[int, list[float]] = (0, [])
        self._means: dict[int, tuple[int, memoryview]] = {}

    def size(self, part: int) -> int:
        """Bytes of an encoded contribution to `part`, or of its encoded mean."""
        return self._sizes[part]

    def take(self, part: int) -> memoryview:
        """Memory to receive an encoded contribution to `part`, or its encoded mean, into."""
        return self._pool.take(self._sizes[part])

    def encode(self, part: int) -> memoryview:
        """This member's encoded contribution to `part`.

        Raises:
            CodecError: The values are not finite.
        """
        where = self._group.parts[part]
        payload = self._pool.take(self._sizes[part])
        try:
            report = self._codecs[part].encode(self._contribution[where.start : where.stop], payload)
        except NonFiniteError as error:
            raise self._located(part, error) from None
        self.clamped += report.clamped
        return payload

    def keep_contribution(self, part: int, member: int, payload: memoryview) -> None:
        """Keep another member's contribution until the round is over: a later decision may need it again.

        Raises:
            CodecError: It does not decode to finite values.
        """
        self._codecs[part].check(payload, self._counts[part])
        self._kept[part][member] = payload

    def keep_mean(self, part: int, contributors: int, payload: memoryview) -> bytes:
        """Keep a mean that came from its owner, decode it; returns its BLAKE3.

        Raises:
            CodecError: It does not decode to finite values.
        """
        where = self._group.parts[part]
        out = self._result[where.start : where.stop]
        try:
            self._codecs[part].decode(payload, out)
        except CodecError:
            if part in self._means:  # A later decision may return to it.
                self._codecs[part].decode(self._means[part][1], out)
            raise
        self._means[part] = (contributors, payload)
        return blake3(payload).digest()

    def mean(self, part: int, contributors: int) -> memoryview | None:
        """The kept mean of `part`, if it is over `contributors`."""
        over, payload = self._means.get(part, (0, None))
        return payload if over == contributors else None

    def means(self) -> tuple[memoryview, ...]:
        """The kept means of all parts, encoded, in order; of a round that has succeeded."""
        return tuple(self._means[part][1] for part in range(len(self._group.parts)))

    def reduction(self, part: int, contributors: int) -> Callable[[], Reduction]:
        """Return the job that applies the rule to the contributions to `part`, encodes the mean, and decodes it.

        The job may run in a thread: it holds all buffers that it uses. It raises `CodecError` if this peer's own values
        are not finite.

        The owner decodes each contribution from its encoded form, its own too, so all owners get the same bytes. For
        the mean the codec does all in one pass: in fp32, in member order, times the share of the weight.
        """
        where = self._group.parts[part]
        weights, kept = self._weights(contributors), self._kept[part]
        payloads = [
            kept[member] if weight and member != self._me else None for member, weight in enumerate(weights)
        ]
        mean = self._pool.take(self._sizes[part])
        own, out = self._contribution[where.start : where.stop], self._result[where.start : where.stop]
        reduce = self._codecs[part].reduce
        if not isinstance(self._rule, Mean):
            reduce = partial(self._apply_rule, self._codecs[part])

        def job() -> Reduction:
            try:
                report = reduce(payloads, weights, own, mean, out)
            except NonFiniteError as error:
                raise self._located(part, error) from None
            return Reduction(mean, blake3(mean).digest(), report.clamped)

        return job

    def keep_reduction(self, part: int, contributors: int, reduction: Reduction) -> None:
        """Keep the result of a job."""
        self._means[part] = (contributors, reduction.mean)
        self.clamped += reduction.clamped

    def _apply_rule(
        self,
        codec: Codec,
        payloads: Sequence[memoryview | None],
        weights: Sequence[float],
        own: Values,
        mean: memoryview,
        out: Values,
    ) -> EncodeReport:
        clamped = 0
        present = [(payload, weight) for payload, weight in zip(payloads, weights, strict=True) if weight]
        rows = torch.empty(len(present), len(own))
        for row, (payload, _) in zip(rows, present, strict=True):
            if payload is None:
                clamped = codec.encode(own, mean).clamped
            codec.decode(mean if payload is None else payload, row)
        shares = torch.tensor([weight for _, weight in present], dtype=torch.float64)
        clamped += codec.encode(self._rule.reduce(rows, shares).values, mean).clamped
        codec.decode(mean, out)
        return EncodeReport(clamped)

    def _weights(self, contributors: int) -> list[float]:
        """Each member's share of the weight; mostly asked of the same contributors for part after part."""
        over, shares = self._shares
        if over != contributors:
            counted = self._group.counted(contributors)
            # `sum` rounds otherwise from Python 3.12 on, and all that reduce must get the same bytes.
            total = math.fsum(counted)
            shares = [weight / total for weight in counted]
            self._shares = (contributors, shares)
        return shares

    def _located(self, part: int, error: NonFiniteError) -> NonFiniteError:
        """The same error, counted from the first value of all."""
        return NonFiniteError(
            self._group.parts[part].start + error.index, len(self._contribution), error.value
        )

    def release(self) -> None:
        """Let go of all bytes."""
        for kept in self._kept:
            kept.clear()
        self._means.clear()
