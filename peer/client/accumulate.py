"""Sums of weighted gradients, in fp32, on the tensors' own device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equipoise.averaging.outcome import check_weight
from equipoise.averaging.schema import SchemaError

LIMIT = torch.finfo(torch.float32).max
"""Bound of all partial sums."""

LEAST_WEIGHT = torch.finfo(torch.float32).smallest_normal
"""Least weight above 0: fp32 holds smaller ones inexactly, or as 0."""

ALIGNED_VALUES = 16
"""Values to whose multiples the sums of a tensor are aligned in their buffer: a cache line."""

LAYOUTS = (torch.strided, torch.sparse_coo)
"""Layouts of gradients. Sparse ones, as those of nn.Embedding(sparse=True), are added to the rows that they touch."""


class NotFinite(SchemaError):
    """A gradient holds NaN or Inf, or what fp32 cannot hold; nothing was added."""


class Accumulator:
    """A weighted sum of gradients and the sum of their weights.

    Attributes:
        weight: Sum of the weights.
        sums: The sums, fp32, by name; undefined while `weight` is 0.
    """

    def __init__(self, like: Mapping[str, torch.Tensor]) -> None:
        """Start at zero, with fp32 tensors of the shapes and devices of `like`."""
        self.sums = _empty(like)
        self.weight = 0.0
        self._bound = 0.0  # No value of the sums is larger than that.

    def add(self, gradients: Mapping[str, torch.Tensor | None], weight: float) -> None:
        """Add `weight` * gradient; a gradient that is None counts as zeros. On an error nothing is added.

        Gradients are floating-point, of the shapes of this accumulator, dense or sparse (COO).

        Raises:
            ValueError: The weight is not a finite number >= 0, or fp32 does not hold it.
            SchemaError: A gradient is missing or has another shape, or the sum would exceed fp32.
            NotFinite: A gradient holds NaN or Inf.
        """
        weight = check_weight(weight)
        if weight and not LEAST_WEIGHT <= weight <= LIMIT:
            raise ValueError(
                f"expected a weight of 0, or {LEAST_WEIGHT:.3g} to {LIMIT:.3g}, as fp32 holds, got {weight:g}"
            )
        present = self._checked(gradients)
        largest = _largest(present)
        if not self._bound + weight * largest < LIMIT:
            raise SchemaError(
                f"the accumulated sum would exceed fp32: {weight:g} times a gradient of up to {largest:g}; "
                f"give smaller weights, or step more often"
            )
        if weight > 0:
            with torch.no_grad():
                for name, total in self.sums.items():
                    _put(total, present.get(name), weight, first=not self.weight)
        self._bound += weight * largest
        self.weight += weight

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator of the same shapes holds."""
        if other.weight:
            with torch.no_grad():
                for name, total in other.sums.items():
                    self.sums[name].add_(total) if self.weight else self.sums[name].copy_(total)
        self.weight += other.weight
        self._bound += other._bound

    def mean(self) -> dict[str, torch.Tensor]:
        """The sum / weight, fp32, by name; zeros where nothing has been accumulated."""
        if not self.weight:
            return {name: torch.zeros_like(total) for name, total in self.sums.items()}
        # By a Python number CUDA would not divide, but multiply by its reciprocal.
        return {name: total / total.new_full((), self.weight) for name, total in self.sums.items()}

    def clear(self) -> None:
        """Back to zero."""
        self.weight = self._bound = 0.0

    def _checked(self, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        present, count = {}, len(self.sums)
        for name, total in self.sums.items():
            if name not in gradients:
                raise SchemaError(f"gradient {name!r} is missing: expected {count}, got {len(gradients)}")
            gradient = gradients[name]
            if gradient is not None:
                _check(name, gradient, total)
                # Of a sparse gradient the rows that were touched, each once, summed in fp32.
                own = gradient.detach()
                present[name] = own.float().coalesce() if own.is_sparse else own
        for name in gradients.keys() - self.sums.keys():
            raise SchemaError(f"gradient {name!r} is not part of the run, which has {count} of them")
        return present


def _put(total: torch.Tensor, gradient: torch.Tensor | None, weight: float, first: bool) -> None:
    """Add weight * gradient to `total`, or to zeros if it is the `first`: to zero `total` before is one more pass."""
    if first and gradient is not None and gradient.dtype == total.dtype and not gradient.is_sparse:
        torch.mul(gradient.to(total.device), weight, out=total)
        return
    if first:
        total.zero_()
    if gradient is not None and total.is_cpu:
        # Fused on CPUs that can. A product of its own would take 1.3 times as long here.
        total.add_(gradient.to(total.device), alpha=weight)
    elif gradient is not None:
        values = gradient.to(total.device, torch.float32)
        total.add_(values if weight == 1 else values * weight)


def _empty(like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Uninitialised fp32 tensors of those shapes and devices: views of one buffer for each device."""
    starts, sizes = {}, dict.fromkeys((one.device for one in like.values()), 0)
    for name, one in like.items():
        starts[name] = sizes[one.device]
        sizes[one.device] += -(-one.numel() // ALIGNED_VALUES) * ALIGNED_VALUES
    with torch.inference_mode(False), torch.no_grad():  # They outlive this call.
        flat = {device: torch.empty(n, dtype=torch.float32, device=device) for device, n in sizes.items()}
        return {
            name: flat[one.device][starts[name] :][: one.numel()].view(one.shape)
            for name, one in like.items()
        }


def _check(name: str, gradient: torch.Tensor, total: torch.Tensor) -> None:
    if not isinstance(gradient, torch.Tensor):
        problem = f"expected a torch.Tensor or None, got {type(gradient).__name__}"
    elif gradient.layout not in LAYOUTS or not gradient.dtype.is_floating_point:
        got = f"{gradient.dtype}, {gradient.layout}"
        problem = f"expected floating-point values, dense or sparse COO, got {got}"
    elif gradient.shape != total.shape:
        problem = f"expected shape {list(total.shape)}, got {list(gradient.shape)}"
    else:
        return
    raise SchemaError(f"gradient {name!r}: {problem}")


def _largest(gradients: Mapping[str, torch.Tensor]) -> float:
    """The largest absolute value of all gradients, with one synchronisation per device.

    Raises:
        NotFinite: One of them holds NaN or Inf.
    """
    peaks: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients.values():
        values = gradient.values() if gradient.is_sparse else gradient
        if values.numel():
            low, high = values.aminmax()
            peaks.setdefault(gradient.device, []).append(torch.maximum(-low, high))
    # Stacked, they have a dtype that holds all of them.
    largest = [float(torch.stack(of_device).max()) for of_device in peaks.values()]
    if all(one <= LIMIT for one in largest):  # The largest of numbers and NaN may be a number.
        return max(largest, default=0.0)
    for name, gradient in gradients.items():
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
        bad = (~torch.isfinite(flat.float())).nonzero()
        if len(bad):
            value = float(flat[bad[0]])
            raise NotFinite(
                f"gradient {name!r} holds {value} at flat index {int(bad[0])} ({len(bad)} such values): expected "
                f"finite values within fp32's range; nothing was accumulated"
            )
    return max(largest)
