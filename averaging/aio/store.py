"""The bytes of one round at one member: encoded contributions, encoded means, and the arithmetic between them."""

from __future__ import annotations

import math

import torch
from blake3 import blake3

from equipoise.averaging.aio.buffers import BufferPool
from equipoise.averaging.allreduce.ballot import members_of
from equipoise.averaging.allreduce.events import Group
from equipoise.compression import Codec, NonFiniteError


class Store:
    """Keeps what arrived, encodes what leaves, reduces, and decodes the result.

    Args:
        group: The round.
        me: This member's index.
        codec: How values travel.
        contribution: f32 [D], this member's values; read only.
        result: f32 [D], takes the mean, part by part as it comes: undefined until the round has succeeded.
        pool: Lends the memory.
    """

    def __init__(
        self,
        group: Group,
        me: int,
        codec: Codec,
        contribution: torch.Tensor,
        result: torch.Tensor,
        pool: BufferPool,
    ) -> None:
        self.clamped = 0
        self._pool = pool
        self._group = group
        self._me = me
        self._codec = codec
        self._contribution = contribution
        self._result = result
        self._stacks: dict[int, memoryview] = {}
        self._own: set[int] = set()
        self._means: dict[int, tuple[int, memoryview]] = {}

    def size(self, part: int) -> int:
        """Bytes of an encoded contribution to `part`, or of its encoded mean."""
        return self._codec.encoded_size(self._group.parts[part].size)

    def take(self, part: int) -> memoryview:
        """Memory to receive an encoded contribution to `part`, or its encoded mean, into."""
        return self._pool.take(self.size(part))

    def encode(self, part: int) -> memoryview:
        """This member's encoded contribution to `part`.

        Raises:
            CodecError: The values are not finite.
        """
        payload = self.take(part)
        self._encode(part, payload)
        return payload

    def keep_contribution(self, part: int, member: int, payload: memoryview) -> None:
        """Keep another member's contribution until the round is over: a later decision may need it again.

        Raises:
            CodecError: It does not decode to finite values.
        """
        self._codec.check(payload, self._group.parts[part].size)
        # Copied: whoever sends one part twice must not be able to change what was checked.
        self._row(part, member)[:] = payload

    def keep_mean(self, part: int, contributors: int, payload: memoryview) -> bytes:
        """Keep a mean that came from its owner, decode it; returns its BLAKE3.

        Raises:
            CodecError: It does not decode to finite values.
        """
        self._codec.check(payload, self._group.parts[part].size)
        self._codec.decode(payload, self._values(part))
        self._means[part] = (contributors, payload)
        return blake3(payload).digest()

    def mean(self, part: int, contributors: int) -> memoryview | None:
        """The kept mean of `part`, if it is over `contributors`."""
        over, payload = self._means.get(part, (0, None))
        return payload if over == contributors else None

    def means(self) -> tuple[memoryview, ...]:
        """The kept means of all parts, encoded, in order; of a round that has succeeded."""
        return tuple(self._means[part][1] for part in range(len(self._group.parts)))

    def reduce(self, part: int, contributors: int) -> bytes:
        """Encode and keep the weighted mean of `part` over `contributors`; returns its BLAKE3.

        Contributions are added in member order, each decoded from its encoded form (our own too), times its share of
        the weight: in fp32, so that the result has one value whoever reduces.

        Raises:
            CodecError: Our own values are not finite.
        """
        if part not in self._own and contributors >> self._me & 1:
            self._encode(part, self._row(part, self._me))
            self._own.add(part)
        # `sum` rounds otherwise from Python 3.12 on, and whoever reduces must get the same bytes.
        total = math.fsum(self._group.weights[member] for member in members_of(contributors))
        weights = [
            weight / total if contributors >> member & 1 else 0.0
            for member, weight in enumerate(self._group.weights)
        ]
        mean = self.take(part)
        report = self._codec.reduce(self._stack(part), weights, mean, self._values(part))
        self.clamped += report.clamped
        self._means[part] = (contributors, mean)
        return blake3(mean).digest()

    def _encode(self, part: int, payload: memoryview) -> None:
        where = self._group.parts[part]
        try:
            report = self._codec.encode(self._contribution[where.start : where.stop], payload)
        except NonFiniteError as error:
            raise NonFiniteError(where.start + error.index, len(self._contribution), error.value) from None
        self.clamped += report.clamped

    def _values(self, part: int) -> torch.Tensor:
        """This part of the result, f32 [values of the part]."""
        where = self._group.parts[part]
        return self._result[where.start : where.stop]

    def _stack(self, part: int) -> memoryview:
        """Room for the contributions of all members to `part`."""
        if part not in self._stacks:
            stride = self._codec.stride(self._group.parts[part].size)
            self._stacks[part] = self._pool.take(stride * self._group.size)
        return self._stacks[part]

    def _row(self, part: int, member: int) -> memoryview:
        start = member * self._codec.stride(self._group.parts[part].size)
        return self._stack(part)[start : start + self.size(part)]

    def release(self) -> None:
        """Let go of all bytes."""
        self._stacks.clear()
        self._means.clear()
