"""The parameters on which the peers of a training agree, beside the copy that each peer's own steps move."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from equipoise.averaging.outer import OuterStep
from equipoise.peer.client.tensors import copies_of
from equipoise.peer.training.image import ModelPart, OuterPart

Named = Mapping[str, torch.Tensor]


class AgreedModel:
    """What all peers hold alike between two rounds, and this peer's copy of it.

    Attributes:
        local: This peer's copy by name: the tensors of its script.
        values: The agreed values by name, fp32.
        part: The model's part in the replicated state.
        outer: The outer step's part.
    """

    def __init__(
        self,
        local: Named,
        buffers: Named,
        outer: OuterStep,
        counters: Named,
        loaded: Callable[[], None],
        merges: bool = False,
    ) -> None:
        """Agree on the copy as it is now.

        Args:
            local: The parameters by name.
            buffers: The buffers that are averaged, by name.
            outer: The outer step, of this model alone.
            counters: See `ModelPart`.
            loaded: Called after a download has replaced the agreed values.
            merges: Whether the copy keeps a part of its own movement after a round.
        """
        self.local, self.values = dict(local), copies_of(local)
        self.part = ModelPart(self.values, buffers, loaded, counters)
        self.outer = OuterPart(outer, self.values)
        self._step = outer.step
        # What was last written to tensors of half precision, before it was rounded, where that is not the agreed.
        half = {name: one for name, one in local.items() if one.element_size() < 4}
        self._merged = copies_of(half) if merges else {}

    @torch.no_grad()
    def step(self, mean: Named) -> None:
        """Make the outer step with the mean of what the peers have moved back by, fp32 by name."""
        self._step(self.values, mean)

    @torch.no_grad()
    def moved(self) -> dict[str, torch.Tensor]:
        """What this peer has moved back by: the agreed values minus its own, by name, fp32."""
        return {name: agreed - self._exact(name) for name, agreed in self.values.items()}

    def began(self, name: str) -> torch.Tensor:
        """The agreed values as they were written: rounded to the dtype of the copy, fp32."""
        return self.values[name].to(self.local[name].dtype).float()

    @torch.no_grad()
    def write(self, merge: float = 0.0) -> None:
        """Make the copy the agreed values, but for a share of what it has moved by."""
        for name, written in self.values.items():
            if merge:
                written = torch.lerp(written, self._exact(name).float(), merge)
            self.local[name].copy_(written)
            if name in self._merged:
                self._merged[name].copy_(written)

    def _exact(self, name: str) -> torch.Tensor:
        """The copy with what rounding took from it as it was written: that is no movement of this peer."""
        written, local = self._merged.get(name, self.values[name]), self.local[name]
        return local if local.element_size() >= 4 else local + (written - written.to(local.dtype).float())
