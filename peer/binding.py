"""A user's tensors and the schemas that a run was joined with."""

from __future__ import annotations

import torch

from equipoise.averaging.schema import Schema, SchemaError
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


def _require_unchanged(what: str, before: Schema, now: Schema) -> None:
    if now == before:
        return
    pairs = zip(before.tensors, now.tensors, strict=False)
    changed = next((old.name for old, new in pairs if old != new), "their number")
    raise SchemaError(f"the {what} have changed since join: {changed}; join again")
