"""Outer steps of training with local steps: what all peers do alike with the mean of what they have moved by.

Between two exchanges every peer trains by itself, from the parameters on which all agreed; then the
mean of the differences takes those one step further, on every peer the same one: along the mean, with and without
momentum; or as in Reddi 2021 (arXiv:2003.00295), which scales each value's step by the squares of its earlier moves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any

import torch

from equipoise.compression.grammar import canonical, decimal
from equipoise.compression.registry import Plugins, Registry


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


class Average(OuterStep):
    """theta <- theta - D, with D the mean of theta - theta_i: the mean of the peers' parameters theta_i.

    Local SGD (Stich 2018, 1805.09767, algorithm 1; McMahan 2017, 1602.05629, calls it FedAvg).
    """

    def __init__(self) -> None:
        super().__init__("average")

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        parameter.sub_(mean)


class Descent(OuterStep):
    """theta <- theta - lr D, with D the mean of theta - theta_i, as SparseLoCo (Sarfi 2025, 2508.15706) does."""

    def __init__(self, lr: float = 1.0) -> None:
        """`lr` is above 0.

        Raises:
            ValueError: It is not.
        """
        self.lr = above_zero("lr", lr)
        super().__init__("descent", lr=self.lr)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        parameter.sub_(mean * self.lr)


class MomentumStep(OuterStep):
    """An outer step with a rate and a momentum."""

    def __init__(self, name: str, lr: float, momentum: float) -> None:
        """`lr` is above 0; `momentum` is at least 0 and below 1.

        Raises:
            ValueError: One of them is out of its range.
        """
        self.lr, self.momentum = above_zero("lr", lr), below_one("momentum", momentum)
        super().__init__(name, lr=self.lr, momentum=self.momentum)


class Nesterov(MomentumStep):
    """m <- mu m + D; theta <- theta - alpha (D + mu m), with D the mean of theta - theta_i, and m = 0 at first.

    DiLoCo (Douillard 2023, 2311.08105, section 2), which names this step and its defaults, for 500 local steps: below
    some hundred, a momentum of .5 trains better (`scripts/text_local_steps.py grid`). The form is that of Sutskever
    2013 as torch.optim.SGD(nesterov=True) computes it. It is not heavy ball (theta <- theta - alpha m): the step looks
    ahead by one more application of the momentum.
    """

    moments = ("moments",)

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        """See `MomentumStep`; `lr` is alpha, `momentum` is mu."""
        super().__init__("nesterov", lr, momentum)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        (moment,) = moments
        moment.mul_(self.momentum).add_(mean)
        parameter.sub_((moment * self.momentum).add_(mean).mul_(self.lr))


class FedAvgM(MomentumStep):
    """v <- m v + g; w <- w - lr v, with g the mean of w - w_i, and v = 0 at first.

    Hsu 2019 (arXiv:1909.06335), section 4. It does not look ahead, as `Nesterov` does. With momentum 0 and lr 1 it is
    FedAvg.
    """

    moments = ("momentum",)

    def __init__(self, lr: float = 1.0, momentum: float = 0.9) -> None:
        """See `MomentumStep`; `momentum` is m."""
        super().__init__("fedavgm", lr, momentum)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        (velocity,) = moments
        velocity.mul_(self.momentum).add_(mean)
        parameter.sub_(velocity * self.lr)


class FedAdagrad(OuterStep):
    """v <- v + d^2; w <- w + eta d / (sqrt v + tau), with d the mean of w_i - w, and v = 0 at first.

    Reddi 2021 (arXiv:2003.00295), algorithm 2, without the first moment.
    """

    moments = ("v",)

    def __init__(self, eta: float = 0.1, tau: float = 1e-3) -> None:
        """`eta` and `tau` are above 0; with a tiny `tau` the rounding of a codec becomes a full step.

        Raises:
            ValueError: One of them is out of its range.
        """
        self.eta, self.tau = above_zero("eta", eta), above_zero("tau", tau)
        super().__init__("fedadagrad", eta=self.eta, tau=self.tau)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        (v,) = moments
        v.add_(mean * mean)
        parameter.sub_((mean * self.eta).div_(root(v).add_(self.tau)))


class AdaptiveStep(OuterStep):
    """An outer step with two moments, m and v."""

    moments = ("m", "v")

    def __init__(self, name: str, eta: float, beta1: float, beta2: float, tau: float) -> None:
        """`eta` and `tau` are above 0, `beta1` and `beta2` at least 0 and below 1.

        With a tiny `tau` the rounding of a codec becomes a full step.

        Raises:
            ValueError: One of them is out of its range.
        """
        self.eta, self.tau = above_zero("eta", eta), above_zero("tau", tau)
        self.beta1, self.beta2 = below_one("beta1", beta1), below_one("beta2", beta2)
        super().__init__(name, eta=self.eta, beta1=self.beta1, beta2=self.beta2, tau=self.tau)


class FedAdam(AdaptiveStep):
    """m <- b1 m + (1 - b1) d; v <- b2 v + (1 - b2) d^2; w <- w + eta_t m / (sqrt v + tau), m = v = 0 at first.

    d is the mean of w_i - w, and eta_t = eta sqrt(1 - b2^(t+1)) / (1 - b1^(t+1)) in round t = 1, 2, ...

    Reddi 2021 (arXiv:2003.00295), algorithm 2; the bias correction is that of Flower's FedAdam, whose exponent is 2 in
    the first round.
    """

    def __init__(self, eta: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        """See `AdaptiveStep`."""
        self._steps = 0
        super().__init__("fedadam", eta, beta1, beta2, tau)

    def step(self, agreed: Mapping[str, torch.Tensor], mean: Mapping[str, torch.Tensor]) -> None:
        """See `OuterStep`."""
        self._steps += 1
        super().step(agreed, mean)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        m, v = moments
        exponent = self._steps + 1
        correction = math.sqrt(1 - _power(self.beta2, exponent)) / (1 - _power(self.beta1, exponent))
        m.mul_(self.beta1).sub_(mean * (1 - self.beta1))
        v.mul_(self.beta2).add_((mean * mean).mul_(1 - self.beta2))
        parameter.add_((m * (self.eta * correction)).div_(root(v).add_(self.tau)))

    def state_dict(self) -> dict[str, Any]:
        """The moments, and the number of steps."""
        return {**super().state_dict(), "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take on another's moments and number of steps."""
        super().load_state_dict(state_dict)
        self._steps = int(state_dict["steps"])


def _power(base: float, exponent: int) -> float:
    """`base` to the power of `exponent` by multiplications alone: the platforms' own powers differ in the last bit."""
    result = 1.0
    for bit in f"{exponent:b}":
        result *= result
        if bit == "1":
            result *= base
    return result


class FedYogi(AdaptiveStep):
    """m <- b1 m + (1 - b1) d; v <- v - (1 - b2) d^2 sign(v - d^2); w <- w + eta m / (sqrt v + tau), m = v = 0 at first.

    d is the mean of w_i - w. Reddi 2021 (arXiv:2003.00295), algorithm 2; there is no bias correction.
    """

    def __init__(self, eta: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        """See `AdaptiveStep`."""
        super().__init__("fedyogi", eta, beta1, beta2, tau)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        m, v = moments
        square = mean * mean
        m.mul_(self.beta1).sub_(mean * (1 - self.beta1))
        v.sub_((v - square).sign_().mul_(square).mul_(1 - self.beta2))
        parameter.add_((m * self.eta).div_(root(v).add_(self.tau)))


OUTER_STEPS: Registry[OuterStep] = Registry(
    "outer step", "outer steps", "nesterov:lr=0.7", 128, Plugins("equipoise.outer", OuterStep)
)
"""All outer steps; `OUTER_STEPS.register` makes another one known, as does an entry point `equipoise.outer` of a
package."""

OUTER_STEPS.register("average", Average)
OUTER_STEPS.register("descent", Descent, lr=decimal(1.0))
OUTER_STEPS.register("nesterov", Nesterov, lr=decimal(0.7), momentum=decimal(0.9))
OUTER_STEPS.register("fedavgm", FedAvgM, lr=decimal(1.0), momentum=decimal(0.9))
OUTER_STEPS.register("fedadagrad", FedAdagrad, eta=decimal(0.1), tau=decimal(1e-3))

_ADAPTIVE = {"beta1": decimal(0.9), "beta2": decimal(0.99), "tau": decimal(1e-3)}
OUTER_STEPS.register("fedadam", FedAdam, eta=decimal(0.1), **_ADAPTIVE)
OUTER_STEPS.register("fedyogi", FedYogi, eta=decimal(0.01), **_ADAPTIVE)

parse_outer = OUTER_STEPS.parse
"""Returns the outer step of a spec, which `str` gives back in its canonical form; raises ValueError with what came,
what is known, and the nearest known name."""
