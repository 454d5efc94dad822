"""A user's tensors and the schemas that a run was joined with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equipoise.averaging.schema import Schema, SchemaError
from equipoise.peer.accumulate import Accumulator
from equipoise.peer.tensors import (
    Tensors,
    gradient_schema,
    named_tensors,
    persistent_buffers,
    sparse_gradients,
    stepped_tensors,
)


class Binding:
    """The user's tensors, looked at afresh for each round, against what was joined with."""

    def __init__(self, tensors: Tensors) -> None:
        self.source = tensors
        self.schema = Schema.of(named_tensors(tensors))
        self.gradients = gradient_schema(stepped_tensors(tensors))
        self.buffers = Schema(())
        self.sparse = sparse_gradients(tensors) if isinstance(tensors, torch.nn.Module) else frozenset()

    @property
    def values(self) -> int:
        """Length of the longer of the two flat vectors."""
        return max(self.schema.size, self.gradients.size)

    def buffer_schema(self) -> Schema:
        """What `carry` would have travel behind the gradients, in fp32 whatever the buffers are.

        Raises:
            SchemaError: This is no module.
        """
        if not isinstance(self.source, torch.nn.Module):
            kind = type(self.source).__name__
            raise SchemaError(
                f"expected an nn.Module, whose buffers are known, got {kind}: agree without buffers"
            )
        return gradient_schema(persistent_buffers(self.source))

    def carry(self, buffers: Schema) -> None:
        """From now on these buffers travel behind the gradients."""
        self.buffers = buffers

    def carried(self) -> dict[str, torch.Tensor]:
        """The buffers that travel behind the gradients, as they are now.

        Raises:
            SchemaError: They have changed.
        """
        if not self.buffers.tensors or not isinstance(self.source, torch.nn.Module):
            return {}
        named = persistent_buffers(self.source)
        _require_unchanged("buffers", self.buffers, gradient_schema(named))
        return named

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors as they are now.

        Raises:
            SchemaError: They are no longer those of the schema.
        """
        named = named_tensors(self.source)
        self.schema.check(named)
        return named

    def stepped(self) -> dict[str, torch.Tensor]:
        """The tensors whose gradients are exchanged, as they are now.

        Raises:
            SchemaError: There are none, or they have changed.
        """
        named = stepped_tensors(self.source)
        if not named:
            raise SchemaError("the module has no parameter that requires gradients: there is nothing to step")
        _require_unchanged("parameters that require gradients", self.gradients, gradient_schema(named))
        return named

    def write_step(self, contribution: torch.Tensor, accumulated: Accumulator | None) -> None:
        """Write what `step` contributes: mean gradients, then buffers; zeros of an observer, which may hold anything.

        Args:
            contribution: The flat vector, f32, of `values` values or more.
            accumulated: What has been accumulated, if anything.

        Raises:
            SchemaError: A buffer has changed since join, or is not finite.
        """
        size = self.gradients.size
        if accumulated is None or accumulated.weight == 0:
            contribution[: size + self.buffers.size].zero_()
            return
        if self.buffers.tensors:
            self.buffers.flatten(self.carried(), contribution[size : size + self.buffers.size])
        accumulated.mean_into(_views(self.gradients, contribution[:size]))

    def read_step(
        self,
        result: torch.Tensor,
        stepped: Mapping[str, torch.Tensor],
        mean: dict[str, torch.Tensor],
        hand_back: bool = True,
    ) -> None:
        """Take over what a step came to.

        Args:
            result: The flat vector, f32.
            stepped: The tensors whose gradients were exchanged.
            mean: By name, fp32, on the tensors' devices; overwritten, or filled.
            hand_back: Whether to overwrite the `.grad` of a module's parameters.

        Raises:
            SchemaError: A buffer has changed since join; nothing was written.
        """
        carried, size = self.carried(), self.gradients.size
        for name, value in _views(self.gradients, result[:size]).items():
            tensor = stepped[name]
            if name not in mean or mean[name].device != tensor.device:
                mean[name] = torch.empty(value.shape, dtype=torch.float32, device=tensor.device)
            mean[name].copy_(value)
            if hand_back and isinstance(self.source, torch.nn.Module):
                _hand_back(tensor, mean[name], name in self.sparse)
        self.buffers.unflatten(result[size : size + self.buffers.size], carried)

    def named(self, result: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The flat vector of a step, f32, as gradients and buffers by name, sharing its memory."""
        size = self.gradients.size
        return _views(self.gradients, result[:size]), _views(
            self.buffers, result[size : size + self.buffers.size]
        )


def _hand_back(tensor: torch.Tensor, mean: torch.Tensor, sparse: bool) -> None:
    """Make the mean, fp32, the parameter's `.grad`, in its dtype; `sparse` leaves out the rows that are zero."""
    if sparse:
        tensor.grad = mean.to_sparse(1).to(tensor.dtype)
        return
    if tensor.grad is None or tensor.grad.layout is not torch.strided:
        tensor.grad = torch.empty_like(tensor)
    tensor.grad.copy_(mean)


def _views(schema: Schema, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The flat vector, f32 [D], as the schema's tensors, sharing its memory."""
    return {spec.name: flat[where].view(spec.shape) for spec, where in schema.slices()}


def _require_unchanged(what: str, before: Schema, now: Schema) -> None:
    if now == before:
        return
    pairs = zip(before.tensors, now.tensors, strict=False)
    changed = next((old.name for old, new in pairs if old != new), "their number")
    raise SchemaError(f"the {what} have changed since join: {changed}; join again")
