"""The base of outer steps: their spec, and their memory of each parameter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any

import torch

from equipoise.compression.grammar import canonical


class OuterStep(ABC):
    """An outer step that treats every value alike, and remembers `moments` of the parameters, 0 at first.

    It does the same, bit for bit, on all peers that are given the same means. `str` is its canonical spec, which peers
    must have alike. Every operation takes whole tensors and is rounded on its own. `alpha=`, `addcmul`, `addcdiv` and
    `lerp` are not used: devices differ in whether they fuse them. Nor is a tensor divided by a number, which some
    multiply by its reciprocal.

    Attributes:
        spec: The canonical spec.
        moments: The names of the moments in the state.
    """

    moments: tuple[str, ...] = ()

    def __init__(self, name: str, **options: float) -> None:
        self.spec = canonical(name, options)
        self._kept: dict[str, dict[str, torch.Tensor]] = {moment: {} for moment in self.moments}

    def __str__(self) -> str:
        return self.spec

    def step(self, agreed: Mapping[str, torch.Tensor], mean: Mapping[str, torch.Tensor]) -> None:
        """Take the agreed parameters one step further, in place.

        Args:
            agreed: f32 or f64, by name: the parameters on which all peers agreed last.
            mean: Like `agreed`, on any device: the mean over the peers of agreed parameters minus own ones.
        """
        for name, parameter in agreed.items():
            for kept in self._kept.values():
                # Those of a checkpoint, or of another peer, come on the CPU.
                found = kept.get(name)
                kept[name] = torch.zeros_like(parameter) if found is None else found.to(parameter.device)
            moments = [kept[name] for kept in self._kept.values()]
            self.move(parameter, mean[name].to(parameter.device), moments)
            # A square may overflow. A moment of infinity would stay, and no newcomer takes such a state.
            limit = torch.finfo(parameter.dtype).max
            for moment in moments:
                moment.clamp_(-limit, limit)

    @abstractmethod
    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """Change one parameter by the mean of what it has moved back by, and its moments, in place."""

    def state_dict(self) -> dict[str, Any]:
        """The moments, by the names of the parameters; a subclass may add counts, which are whole numbers."""
        return {moment: dict(kept) for moment, kept in self._kept.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take on another's moments."""
        self._kept = {moment: dict(state_dict[moment]) for moment in self.moments}


def root(values: torch.Tensor) -> torch.Tensor:
    """The square roots of f32 or f64 values; of f32 correctly rounded on every processor.

    torch's own roots of f32 may be off by the last bit, by another one elsewhere. No root of an f32 lies so close to
    the middle between two of them that an error of the last bit of an f64 would count.
    """
    return values.double().sqrt().to(values.dtype)


def above_zero(name: str, value: float) -> float:
    """Return a hyperparameter that is a finite number above 0; raise ValueError for any other."""
    require_in_range(name, value, math.ulp(0.0), math.inf, "a finite number above 0")
    return float(value)


def below_one(name: str, value: float) -> float:
    """Return a hyperparameter that is a number from 0 to below 1; raise ValueError for any other."""
    require_in_range(name, value, 0.0, 1.0, "a number from 0 to below 1")
    return float(value)


def require_in_range(
    name: str, value: object, least: float, below: float, expected: str, kind: type | UnionType = int | float
) -> None:
    """Raise ValueError, which says what is `expected`, unless a value is a number from `least` to below `below`."""
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < below:  # type: ignore[operator]
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
