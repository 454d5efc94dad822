"""Clinics train one model of breast cancer in federated rounds; no patient's data leaves a clinic.

The 569 patients of scikit-learn's breast cancer data are split unevenly, and half of them are for the test. Each clinic
measures in units of its own, so each keeps a personal first layer, and only the rest of the model is shared. The second
of four clinics or more has half of its labels wrong: rule="median" bears that.

    python clinics.py --peers 4 --small             # a whole swarm on this machine
    python clinics.py --of 3                        # the first of three machines; it prints its address
    python clinics.py --of 3 --index 1 --join ADDRESS
"""

from __future__ import annotations

import argparse

import torch
from local_swarm import Curve, Result, main
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import cross_entropy

from equipoise.peer import Peer
from equipoise.peer.training import Federated, Task

FEATURES, HIDDEN, CLASSES = 30, 16, 2

BROKEN_FROM = 4
"""Fewest clinics of which one has broken labels: of three, a median of two honest ones is their mean."""


class Clinic:
    """One clinic's patients: features, f32 [n, 30], and labels, i64 [n]. Every second patient is for the common test.

    Clinic `index` has `index` + 1 times as many patients as the first.
    """

    def __init__(self, index: int, clinics: int) -> None:
        bunch = load_breast_cancer()
        features = torch.as_tensor(bunch.data, dtype=torch.float32)
        features = (features - features.mean(0)) / features.std(0)
        labels, chance = (
            torch.as_tensor(bunch.target, dtype=torch.int64),
            torch.Generator().manual_seed(index),
        )
        if clinics > 1:  # Its machines measure in other units.
            features = features * (0.5 + torch.rand(FEATURES, generator=chance))
        tests = torch.arange(len(labels)) % 2 == 0
        self.test = features[tests], labels[tests]
        order = torch.randperm(int((~tests).sum()), generator=torch.Generator().manual_seed(0))
        start, end = (len(order) * at * (at + 1) // (clinics * (clinics + 1)) for at in (index, index + 1))
        mine = (~tests).nonzero().flatten()[order[start:end]]
        self.features, self.labels = features[mine], labels[mine]
        if clinics >= BROKEN_FROM and index == 1:
            wrong = torch.rand(len(mine), generator=chance) < 0.5
            self.labels = torch.where(wrong, 1 - self.labels, self.labels)


class Model(nn.Module):
    """Two layers behind a personal one, which turns a clinic's units into common ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.Parameter(torch.ones(FEATURES))
        self.shared = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits, f32 [n, 2], of features, f32 [n, 30]."""
        logits: torch.Tensor = self.shared(features * self.units)
        return logits


def train(peer: Peer | None, options: argparse.Namespace) -> Result:
    """Train for some rounds, in each of which every clinic makes `steps` steps."""
    model, rounds, steps = Model(), 8 if options.small else 20, 10
    clinics = [Clinic(options.index, options.of)]
    if (
        options.pooled
    ):  # As one machine would hold them: in the clinics' units, with the labels that they gave.
        clinics = [Clinic(index, options.pooled) for index in range(options.pooled)]
    features, labels = (torch.cat([getattr(one, part) for one in clinics]) for part in ("features", "labels"))
    tests, truth = (torch.cat([one.test[at] for one in clinics]) for at in (0, 1))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(task: Task | None) -> tuple[float, dict[str, float]]:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = cross_entropy(model(features), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return float(len(labels)), {"loss": loss.item()}

    @torch.no_grad()
    def judged() -> float:
        return cross_entropy(model(tests), truth).item()

    curve = Curve(judged)
    if peer is None:
        for _ in range(rounds):
            curve.add(None)
            fit(None)
        curve.add(None)
    else:
        strategy = f"federated:available={options.of},quorum={options.of - options.of // 3}"
        shared = dict(model.shared.named_parameters())
        with peer.join("clinics", shared, strategy=strategy, rule="median", codec="fp32") as run:

            def evaluate(task: Task) -> tuple[float, dict[str, float]]:
                curve.add(run)
                return float(len(truth)), {"loss": judged()}

            Federated(run, fit, evaluate, rounds=rounds).run()
            curve.add(run)
    return curve.result(model.shared.parameters())


if __name__ == "__main__":
    main(train, __doc__)
