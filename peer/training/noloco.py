"""Exchanges of pairs with an outer step, for which the loop does not wait: NoLoCo (2025, 2506.10911).

Beside its parameters theta each peer holds slow ones, phi. A pair averages copies of both. Each of its peers then makes

    m <- alpha m + beta mean(theta - phi) + beta (mean(phi) - phi);  phi <- phi + m;  theta <- phi

with momentum alpha and rate beta, and keeps what its loop has moved theta by since the copies were taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.outer import Nesterov, OuterStep, parse_outer
from equipoise.peer.client.futures import PendingRound
from equipoise.peer.client.run import JoinedRun

MOVED, SLOW = "moved/", "slow/"
"""What the names of the two vectors of a tensor begin with."""


class PairedStep:
    """The outer step of one peer, and the run in which pairs exchange its two vectors.

    Memory is four times that of the tensors, in fp32, on their devices.
    """

    def __init__(self, run: JoinedRun, tensors: Mapping[str, torch.Tensor], outer: str) -> None:
        """Agree with the others on the step, and begin with phi at the tensors' values.

        Raises:
            ValueError: `outer` is not the spec of a Nesterov step.
            Refused: The others make another step.
        """
        step: OuterStep = parse_outer(outer)
        if not isinstance(step, Nesterov):
            raise ValueError(f'outer: expected nesterov, as in "nesterov:lr=0.7,momentum=0.3", got {outer!r}')
        self._step = step
        self._tensors = tensors
        self._copies = _copies(tensors)
        self._momentum = {name: torch.zeros_like(copy) for name, copy in self._copies.items()}
        self._slow, self._moved = _copies(tensors), _copies(tensors)
        self._is_new = True
        run.agree({"outer": str(step)})
        named = {MOVED + name: moved for name, moved in self._moved.items()}
        self.run = run.core.branch(
            f"{run.name}/outer", named | {SLOW + name: slow for name, slow in self._slow.items()}
        )

    @torch.no_grad()
    def begin(self, weight: float, timeout: float) -> PendingRound:
        """Begin an exchange of copies of both vectors."""
        for name, tensor in self._tensors.items():
            self._copies[name].copy_(tensor)
            torch.sub(self._copies[name], self._slow[name], out=self._moved[name])
        return self.run.average(weight, timeout, wait=False)

    @torch.no_grad()
    def end(self, pending: PendingRound) -> Outcome:
        """Return the outcome of an exchange, and make the step if the outcome is ok.

        In its first exchange a peer takes phi from its partner. Later it is drawn there by `lr`.
        """
        before = {name: slow.clone() for name, slow in self._slow.items()}
        outcome = pending.result()
        if not outcome.ok:
            return outcome
        for name, tensor in self._tensors.items():
            slow, momentum, moved = self._slow[name], self._momentum[name], self._moved[name]
            drawn = slow - before[name]
            momentum.mul_(self._step.momentum).add_(moved * self._step.lr)
            if not self._is_new:
                momentum.add_(drawn * self._step.lr)
                slow.copy_(before[name])
            slow.add_(momentum)
            tensor.copy_(tensor.float() + (slow - self._copies[name]))
        self._is_new = False
        return outcome


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().clone() for name, tensor in tensors.items()}
