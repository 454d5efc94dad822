"""What every tensor of a chaos run must hold, computed in float64 from the seed alone.

A member's vector is drawn from (seed, member, round). It repeats a tile of prime length, which no share or part is a
multiple of: a value that is lost, stale, misplaced or counted twice shows, and truth costs one tile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from equipoise.compression import parse_codec

TILE = 1_000_003
"""A prime near 1M; shares and parts start at multiples of 256."""

STEPS = {"fp32": 1e-6, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 254, "nf4": 0.155, "sparse": 1e-6}
"""The most that rounding to a codec once puts a value off, relative to the largest of its block. A mean of sparse is
compared with that of what the contributions decode to."""

SLACK = 1.01
"""fp32 arithmetic on top of the rounding."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one member brought into one round."""

    member: int
    round: int
    weight: float


@dataclass(frozen=True, slots=True)
class Error:
    """How far a tensor is from a mean: in the 2-norm, and the worst value against what the codec may cost."""

    relative: float
    share_of_bound: float


class Truth:
    """The vectors of a run and their means.

    Args:
        seed: Of the run.
        values: Length of a vector.
        codec: By which means travel.
    """

    def __init__(self, seed: int, values: int, codec: str) -> None:
        self._seed = seed
        self._size = min(values, TILE)
        self._step = STEPS[codec.partition(":")[0]]
        self._codec = parse_codec(codec)

    def fill(self, tensor: torch.Tensor, member: int, round: int) -> None:
        """Write a member's vector of a round into its tensor, f32 [D]."""
        for chunk, values in _tiled(tensor, self._tile(member, round)):
            chunk.copy_(values)

    def untouched(self, tensor: torch.Tensor, member: int, round: int) -> bool:
        """Whether a tensor still holds, bit for bit, what `fill` wrote."""
        return all(torch.equal(chunk, values) for chunk, values in _tiled(tensor, self._tile(member, round)))

    def error(self, tensor: torch.Tensor, contributions: Sequence[Contribution]) -> Error:
        """How far a tensor is from the weighted mean of `contributions`."""
        total = sum(contribution.weight for contribution in contributions)
        mean = torch.zeros(self._size, dtype=torch.float64)
        largest = 0.0
        for one in contributions:
            tile = self._given(one).double()
            largest = max(largest, float(tile.abs().max()))
            mean += tile * (one.weight / total)
        worst, squares, norm = 0.0, 0.0, 0.0
        for chunk, values in _tiled(tensor, mean):
            off = chunk.double() - values
            # NaN must not pass for the smaller of two.
            worst = max(float(off.abs().nan_to_num(nan=float("inf")).max()), worst)
            squares += float(off.square().sum())
            norm += float(values.square().sum())
        # Contributions are rounded, and their mean once more; no mean is larger than the largest contribution.
        bound = 2 * self._step * largest * SLACK
        return Error((squares / norm) ** 0.5, worst / bound)

    def _given(self, one: Contribution) -> torch.Tensor:
        """What a contribution holds: of `sparse`, what is left of its values."""
        tile = self._tile(one.member, one.round)
        if self._codec.needs_feedback:
            payload = bytearray(self._codec.encoded_size(len(tile)))
            self._codec.encode(tile.mul_(one.weight).div_(torch.tensor(one.weight)), payload)
            self._codec.decode(payload, tile)
        return tile

    def _tile(self, member: int, round: int) -> torch.Tensor:
        text = f"{self._seed}/{member}/{round}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        return torch.randn(self._size, generator=torch.Generator().manual_seed(seed))


def _tiled(tensor: torch.Tensor, tile: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for chunk in tensor.split(tile.numel()):
        yield chunk, tile[: chunk.numel()]
