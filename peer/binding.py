"""A user's tensors and the schemas that a run was joined with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equipoise.averaging.layout import Layout
from equipoise.averaging.schema import Schema, SchemaError
from equipoise.compression import Codec
from equipoise.peer.accumulate import Accumulator
from equipoise.peer.tensors import (
    Tensors,
    buffer_schema,
    gradient_schema,
    named_tensors,
    persistent_buffers,
    sparse_gradients,
    stepped_tensors,
    tensor_schema,
)


class Binding:
    """The user's tensors, looked at afresh for each round, against what was joined with.

    Attributes:
        source: The tensors.
        schema: What `average` exchanges.
        gradients: What `step` exchanges gradients of.
        buffers: What travels behind them.
        averaged: The flat vector of `average`.
        stepping: The flat vector of `step`.
        sparse: Names of the parameters whose `.grad` is sparse.
    """

    def __init__(self, tensors: Tensors, codec: Codec) -> None:
        self.source = tensors
        self.schema = tensor_schema(tensors)
        self.gradients = gradient_schema(stepped_tensors(tensors))
        self.buffers = Schema(())
        self.averaged = Layout(self.schema, codec)
        self.stepping = Layout(self.gradients, codec)
        self.sparse = sparse_gradients(tensors) if isinstance(tensors, torch.nn.Module) else frozenset()

    @property
    def values(self) -> int:
        """Length of the longer of the two flat vectors."""
        return max(self.averaged.size, self.stepping.size)

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
        return buffer_schema(self.source)

    def carry(self, buffers: Schema) -> None:
        """From now on these buffers travel behind the gradients."""
        self.buffers = buffers
        both = Schema((*self.gradients.tensors, *buffers.tensors))
        self.stepping = Layout(both, self.stepping.codec)

    def carried(self) -> dict[str, torch.Tensor]:
        """The buffers that travel behind the gradients, as they are now.

        Raises:
            SchemaError: They have changed.
        """
        if not self.buffers.tensors or not isinstance(self.source, torch.nn.Module):
            return {}
        _require_unchanged("buffers", self.buffers, buffer_schema(self.source))
        return persistent_buffers(self.source)

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
        if accumulated is None or accumulated.weight == 0:
            contribution[: self.stepping.size].zero_()
            return
        self.stepping.flatten(self.carried(), contribution)
        accumulated.mean_into(self._gradients_in(contribution))

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
        carried = self.carried()
        for name, value in self._gradients_in(result).items():
            tensor = stepped[name]
            if name not in mean or mean[name].device != tensor.device:
                mean[name] = torch.empty(value.shape, dtype=torch.float32, device=tensor.device)
            mean[name].copy_(value)
            if hand_back and isinstance(self.source, torch.nn.Module):
                _hand_back(tensor, mean[name], name in self.sparse)
        self.stepping.unflatten(result, carried)

    def named(self, result: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The flat vector of a step, f32, as gradients and buffers by name, sharing its memory."""
        carried = {tensor.name for tensor in self.buffers.tensors}
        return self._gradients_in(result), self.stepping.views(result, carried)

    def _gradients_in(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.stepping.views(flat, {tensor.name for tensor in self.gradients.tensors})


def _hand_back(tensor: torch.Tensor, mean: torch.Tensor, sparse: bool) -> None:
    """Make the mean, fp32, the parameter's `.grad`, in its dtype; `sparse` leaves out the rows that are zero."""
    if sparse:
        tensor.grad = mean.to_sparse(1).to(tensor.dtype)
        return
    if tensor.grad is None or tensor.grad.layout is not torch.strided:
        tensor.grad = torch.empty_like(tensor)
    tensor.grad.copy_(mean)


def _require_unchanged(what: str, before: Schema, now: Schema) -> None:
    if now == before:
        return
    pairs = zip(before.tensors, now.tensors, strict=False)
    changed = next((old.name for old, new in pairs if old != new), "their number")
    raise SchemaError(f"the {what} have changed since join: {changed}; join again")
