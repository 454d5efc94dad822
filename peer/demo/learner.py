"""One learner: a small network, AdamW, and batches drawn from its own share of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from equipoise.peer.demo.digits import Digits
from equipoise.peer.demo.options import BATCH

HIDDEN = 256
LEARNING_RATE = 5e-3

MODEL_SEED = 1
"""All peers start from the same parameters, and so stay bit-identical as long as all apply the same means."""


class Learner:
    """Trains on one share of the data, by itself or with others' gradients."""

    def __init__(self, share: Digits, seed: int) -> None:
        self.model = _network()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        for parameter in self.model.parameters():
            self._optimizer.state[parameter] = _fresh_moments(parameter)
        self._batches = _batches(share, torch.Generator().manual_seed(seed))

    def backward(self) -> tuple[float, int]:
        """Put the mean gradient of the next batch into the parameters' `.grad`; returns (mean loss, samples)."""
        batch = next(self._batches)
        self._optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(self.model(batch.pixels), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), len(batch.labels)

    def update(self) -> None:
        """Apply the gradient that stands in `.grad`."""
        self._optimizer.step()

    @property
    def updates(self) -> int:
        """How many updates have led to the present state."""
        return round(float(self.state()["0.weight.step"]))

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next update depends on but its gradient: parameters, and what AdamW remembers; not copies."""
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state[name] = parameter
            state.update(
                {f"{name}.{key}": tensor for key, tensor in self._optimizer.state[parameter].items()}
            )
        return state

    def accuracy(self, test: Digits) -> float:
        """Fraction of `test` that is classified correctly, 0 to 1."""
        with torch.no_grad():
            return float((self.model(test.pixels).argmax(1) == test.labels).float().mean())

    def digest(self) -> str:
        """SHA-256 in hex of all parameters' bytes."""
        content = hashlib.sha256()
        for parameter in self.model.parameters():
            content.update(parameter.detach().contiguous().numpy().tobytes())
        return content.hexdigest()

    @property
    def values(self) -> int:
        """Number of values in the gradient."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def train_alone(share: Digits, seed: int, batches: Sequence[int]) -> Learner:
    """A learner that has made one update from each number of `batches` of its own share, without anybody's help.

    With the seed and the numbers of batches of a peer of the swarm it sees the very same samples in the same order.
    """
    learner = Learner(share, seed)
    parameters = list(learner.model.parameters())
    for count in batches:
        total = [torch.zeros_like(parameter) for parameter in parameters]
        samples = 0
        for _ in range(count):
            _, size = learner.backward()
            samples += size
            for mean, parameter in zip(total, parameters, strict=True):
                mean.add_(_gradient(parameter), alpha=size)
        for mean, parameter in zip(total, parameters, strict=True):
            _gradient(parameter).copy_(mean / samples)
        learner.update()
    return learner


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "backward() comes first"
    return parameter.grad


def _fresh_moments(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """AdamW's state before the first update, which it would else make only then."""
    zeros = torch.zeros_like(parameter, requires_grad=False)
    return {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def _network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(MODEL_SEED)
        return nn.Sequential(
            nn.Linear(64, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 10),
        )


def _batches(share: Digits, generator: torch.Generator) -> Iterator[Digits]:
    """Batches of `BATCH` samples for ever, the share shuffled anew each time it has been seen whole."""
    while True:
        order = torch.randperm(len(share.labels), generator=generator)
        for start in range(0, len(order), BATCH):
            yield share.pick(order[start : start + BATCH])
