"""`Run`: one training effort that a script takes part in, with the optimizer that trains for it."""

from __future__ import annotations

from typing import Unpack

import torch

from equipoise.peer.client.run import JoinedRun
from equipoise.peer.training.checkpoint import Checkpoints
from equipoise.peer.training.optimizer import SwarmOptimizer, swarm_optimizer
from equipoise.peer.training.options import OptionKeywords


class Run(JoinedRun):
    """Takes part in rounds with this script's tensors; one round at a time.

    `average` exchanges the tensors, `step` accumulated gradients. Peers that average never meet peers that step.

    Attributes:
        name: The run's name.
        mean: The mean of the last ok `step`, by name, fp32, on the tensors' devices. Empty before the first one.
        options: The strategy, rule, codec and sizes that its peers share.
        terms: The terms given to `agree`.
        core: What trainers need of the run, and scripts do not.
        pending: The round that was started with `wait=False` and whose `result` has not been called yet.
    """

    def optimizer(
        self,
        inner: torch.optim.Optimizer,
        *,
        checkpoints: Checkpoints | None = None,
        **options: Unpack[OptionKeywords],
    ) -> SwarmOptimizer:
        """Wrap any torch optimizer over this run's parameters, so that the whole swarm makes its steps together.

        Args:
            inner: The optimizer.
            checkpoints: When to write checkpoints, and whether to start from one; None: neither.
            **options: Fields of `equipoise.peer.training.Options`; `target_batch_size` is required.

        Raises:
            TypeError: An option is unknown; names it, and the closest known one.
            ValueError: An option is out of its range.
            CheckpointError: Training should resume, but the checkpoints are damaged or of another training.
            Refused: The run's parameters are not the optimizer's.
        """
        return swarm_optimizer(self, inner, checkpoints, **options)
