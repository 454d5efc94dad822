"""The demo's learner with a model and an optimizer under which federated rounds are simple to follow."""

from __future__ import annotations

import torch

from equipoise.peer.demo.trainer import Digits, Learner

RATE = 0.1


class SoftmaxLearner(Learner):
    """Softmax regression with plain SGD: peers that each have a few classes do not pull it far apart."""

    def __init__(self, share: Digits, seed: int) -> None:
        super().__init__(share, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)  # All peers start from the same parameters.
            self.model = torch.nn.Linear(64, 10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
