"""Simulated peers come to what real daemons come to, by one and the same training script."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from e2e.learners import shared_daemons
from e2e.swarm import DaemonProcess
from e2e.threads import together
from equipoise.peer import Client, connect
from equipoise.peer.simulation import simulate
from equipoise.peer.training import Federated, Task

PEERS, ROUNDS = 8, 3

STRATEGY = f"federated:available={PEERS},minimum={PEERS},quorum={PEERS}"


class Ended(NamedTuple):
    """The end of one peer: its model, and the metrics and evaluations of all rounds."""

    model: torch.Tensor
    metrics: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    digest: str


def script(peer: Client, index: int) -> Ended:
    """Local regression on a peer's own data, in rounds."""
    chance = torch.Generator().manual_seed(index)
    inputs = torch.randn(40, 30, generator=chance)
    targets = inputs.sum(1) + index
    weights = torch.zeros(30)

    def loss() -> torch.Tensor:
        return (inputs @ weights - targets).square().mean()

    def fit(task: Task) -> tuple[float, dict[str, float]]:
        for _ in range(3):
            weights.sub_(0.02 * inputs.T @ (inputs @ weights - targets) / 20)
        return 1.0 + index, {"loss": float(loss())}

    def evaluate(task: Task) -> tuple[float, dict[str, float]]:
        return 1.0, {"loss": float(loss())}

    with peer.join("alike", [weights], strategy=STRATEGY, codec="fp32") as run:
        history = Federated(run, fit, evaluate, "fedadam", rounds=ROUNDS).run()
    agreed = [record.metrics for record in history], [record.evaluation for record in history]
    return Ended(weights, *agreed, history[-1].digest)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_eight_simulated_peers_come_to_what_eight_daemons_do(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def live(place: DaemonProcess, index: int) -> Ended:
        with connect(place.home) as peer:
            return script(peer, index)

    with shared_daemons(tmp_path_factory, PEERS) as places:
        real = together(live, places, range(PEERS))
    simulated = [one for one in simulate(script, PEERS, codec="fp32") if one is not None]
    assert len({one.digest for one in real}) == len({one.digest for one in simulated}) == 1
    for here, there in zip(real, simulated, strict=True):
        torch.testing.assert_close(there.model, here.model, rtol=0, atol=1e-5)
        for mine, theirs in zip(
            (*here.metrics, *here.evaluations), (*there.metrics, *there.evaluations), strict=True
        ):
            assert theirs == pytest.approx(mine, rel=1e-5)
    assert float(real[0].model.abs().max()) > 0.1
