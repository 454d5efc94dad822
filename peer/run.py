"""`Run`: one training effort that a script takes part in, with the optimizer that trains for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch

from equipoise.peer.client.channels import Delivery, Message
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

    def send(
        self,
        peer: str,
        topic: str,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        codec: str = "raw",
        **fields: Any,
    ) -> Delivery:
        """Send a message to the script of another peer of this run; returns at once.

        The tensors may change afterwards. Each message that is acknowledged is received once, in order for a sender and
        a topic, also if daemons are started again meanwhile. At most 64 messages, and 256 MB, wait at a receiver, and
        as many here for it: while it does not receive, nothing is acknowledged, and at last nothing is sent.

        Args:
            peer: PeerID of the receiver, as in `members`; its terms must be equal.
            topic: The topic that it receives, of up to 64 characters.
            tensors: By name, of any dtype and device; with the fields they take at most 256 MB.
            codec: The encoding of floating-point tensors: `raw` for exact values, else as in `join`.
            fields: Text, numbers, lists and dicts, as JSON has them.

        Raises:
            ValueError: The topic, a field or a tensor cannot be sent.
            equipoise.compression.CodecError: The codec is unknown, or needs error feedback; or a value is not finite.
        """
        return self.core.channels.send(peer, topic, tensors or {}, codec, fields)

    def receive(self, topic: str, timeout: float = 60.0) -> Message | None:
        """Take the next message of a topic, in order of arrival; None if none comes within `timeout` seconds.

        Raises:
            equipoise.peer.client.safetensors_io.ImageError: A peer sent what is no message; it is dropped.
            Refused: The run was left, or too many calls wait already.
            DaemonLost: The daemon has gone, and no other has taken its place in time.
        """
        return self.core.channels.receive(topic, timeout)
