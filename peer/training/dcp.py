"""The swarm's state for `torch.distributed.checkpoint`: `dcp.save({"swarm": SwarmState(opt)}, checkpoint_id=folder)`.

It saves the tensors of an image (see `equipoise.peer.training.image`) under their paths there, so that other tools find
`model/...` and `optimizer/state/...`, and the image's metadata as text. Loading checks all of it against the model, as
with an image from another peer, before anything changes. `Checkpoints` do not need this module.
"""

from __future__ import annotations

from typing import Any

import torch

from equipoise.peer.client.safetensors_io import ImageError, pack, unpack
from equipoise.peer.training.image import remembered
from equipoise.peer.training.optimizer import SwarmOptimizer

ABOUT = "about"
"""Key of the image's metadata, beside the tensors."""


class SwarmState:
    """A `torch.distributed.checkpoint` `Stateful` of parameters, optimizer, scheduler, extra state, and epoch."""

    def __init__(self, optimizer: SwarmOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state. It holds zeros for optimizer state that does not exist yet.

        `dcp.load` reads only the keys that it finds here, into the tensors here. So an optimizer that has not stepped
        yet must name its moments too. On loading, `about` tells which of them count.
        """
        tensors, about = unpack(self._optimizer.image())
        inner, parameters = self._optimizer.inner, self._optimizer.parameters
        stepped = self._optimizer.masters.tensors
        has_all = all(parameter in inner.state for parameter in parameters.values())
        future = {
            f"optimizer/state/{name}/{key}": torch.zeros_like(value)
            for name, kept in ({} if has_all else remembered(inner, parameters, stepped)).items()
            for key, value in kept.items()
            if isinstance(value, torch.Tensor)
        }
        return {**future, **tensors, ABOUT: about}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take on the state.

        Raises:
            ImageError: It does not fit, or is no state of this kind; nothing was loaded.
        """
        tensors = {name: value for name, value in state_dict.items() if name != ABOUT}
        about = state_dict.get(ABOUT)
        are_tensors = all(isinstance(value, torch.Tensor) for value in tensors.values())
        if not isinstance(about, dict) or not are_tensors:
            raise ImageError("expected what SwarmState.state_dict returned, got something else")
        self._optimizer.load(pack(tensors, about))
