"""Several daemons with a client each in this process, and rounds of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from e2e.swarm import DaemonProcess, eventually
from equipoise.averaging.outcome import Idle, Outcome
from equipoise.peer import Client, Run, connect


class Fleet(contextlib.ExitStack):
    """One run over all daemons; member i holds `values[i]` until a round changes it."""

    def __init__(
        self,
        daemons: Sequence[DaemonProcess],
        values: Sequence[torch.Tensor],
        patience: float = 30.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.daemons = list(daemons)
        self.values = [value.clone() for value in values]
        self.tensors = [value.clone() for value in values]
        self.clients: list[Client] = [self.enter_context(connect(daemon.home)) for daemon in daemons]
        self.runs: list[Run] = [
            client.join("fleet", {"w": tensor}, **options)
            for client, tensor in zip(self.clients, self.tensors, strict=True)
        ]
        # Before they know each other, peers rightly form groups of those they know.
        for run in self.runs:
            eventually(lambda run=run: self._knows_all(run), "all peers to know each other", patience)

    def start(self, weights: Sequence[float], timeout: float = 60.0) -> list[Any]:
        """Start a round of everyone; returns what to collect its outcomes from."""
        return [
            run.average(weight=weight, timeout=timeout, wait=False)
            for run, weight in zip(self.runs, weights, strict=True)
        ]

    def whole(self, weights: Sequence[float], timeout: float = 20.0) -> list[Outcome]:
        """The outcomes of a round of all members: on busy cores a group may close before all have begun to seek it."""
        while True:
            for tensor, value in zip(self.tensors, self.values, strict=True):
                tensor.copy_(value)
            outcomes = [pending.result() for pending in self.start(weights, timeout)]
            if all(len(outcome.group) == len(self.runs) for outcome in outcomes):
                return outcomes

    def _knows_all(self, run: Run) -> bool:
        state = run.state
        return len(self.runs) == 1 or (isinstance(state, Idle) and state.peers == len(self.runs) - 1)

    def error(self, member: int, outcome: Outcome) -> float:
        """Relative error, in the 2-norm, of a member's tensor against the float64 mean over the named contributors."""
        index = {client.peer_id: place for place, client in enumerate(self.clients)}
        total = sum(outcome.contributors.values())
        mean = torch.zeros_like(self.values[0], dtype=torch.float64)
        for peer, weight in outcome.contributors.items():
            mean += self.values[index[peer]].double() * (weight / total) * outcome.shrunk.get(peer, 1.0)
        return float((self.tensors[member].double() - mean).norm() / mean.norm())

    def check(self, outcomes: dict[int, Outcome], bound: float) -> float:
        """Every outcome is ok, exact within `bound`, and the same, bit for bit, at every member; returns the error."""
        first = next(iter(outcomes))
        for member, outcome in outcomes.items():
            assert outcome.ok, outcome
            assert outcome.contributors == outcomes[first].contributors
            assert outcome.digest == outcomes[first].digest
            assert torch.equal(self.tensors[member], self.tensors[first])
        error = self.error(first, outcomes[first])
        assert error <= bound
        return error


def normal(count: int, size: int) -> list[torch.Tensor]:
    """`count` vectors of N(0, 1)."""
    return [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]
