"""A user's tensors and the schemas that a run was joined with."""

from __future__ import annotations

import torch

from equipoise.averaging.schema import Schema, SchemaError
from equipoise.peer.tensors import Tensors, gradient_schema, named_tensors, stepped_tensors


class Binding:
    """The user's tensors, looked at afresh for each round, against what was joined with."""

    def __init__(self, tensors: Tensors) -> None:
        self.source = tensors
        self.schema = Schema.of(named_tensors(tensors))
        self.gradients = gradient_schema(stepped_tensors(tensors))

    @property
    def values(self) -> int:
        """Length of the longer of the two flat vectors."""
        return max(self.schema.size, self.gradients.size)

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
        found = gradient_schema(named)
        if found != self.gradients:
            changed = next(
                (
                    old.name
                    for old, new in zip(self.gradients.tensors, found.tensors, strict=False)
                    if old != new
                ),
                "their number",
            )
            raise SchemaError(
                f"the parameters that require gradients have changed since join: {changed}; join again"
            )
        return named
