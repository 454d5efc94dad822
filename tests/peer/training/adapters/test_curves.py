"""Curves hold what the trainers report: the mean over the peers that counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.peer import Run
from equipoise.peer.simulation import SimulatedPeer, simulate
from equipoise.peer.training import DiLoCo
from equipoise.peer.training.adapters import TensorBoard, WandB


class Listed(list[tuple[str, float, int]]):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.append((tag, scalar_value, global_step))


def train(peer: SimulatedPeer, index: int, watch: Any = lambda run: None) -> dict[str, float]:
    w = torch.nn.Parameter(torch.zeros(300))
    with peer.join("digits", [w]) as run:
        watch(run)
        with pytest.raises(ValueError, match=r"expected one number as 'loss', got a tensor of shape \[2\]"):
            run.report(loss=torch.zeros(2))
        optimizer = run.optimizer(torch.optim.SGD([w], 0.1), target_batch_size=2, wait_for=1)
        while optimizer.epoch < 4:
            loss = (w - index).square().mean()
            run.report(loss=loss, bad=float("nan"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return run.metrics()


def test_curves_and_metrics_have_the_mean_of_what_the_peers_report(caplog: pytest.LogCaptureFixture) -> None:
    curves = Listed()

    def work(peer: SimulatedPeer, index: int) -> dict[str, float]:
        return train(peer, index, lambda run: TensorBoard(run, curves if index == 0 else None))  # type: ignore[arg-type]

    first, second = simulate(work, 2)
    assert first is not None
    assert second is not None
    assert first["loss"] == second["loss"] > 0
    assert (first["group_size"], first["rounds_counted"]) == (2, 4)
    assert first["rounds"] >= first["rounds_ok"] >= 4
    assert first["bytes_sent"] > 1000 < first["bytes_received"]
    assert {"seconds/matchmaking", "seconds/total"} <= first.keys() - {"bad"}
    losses = {step: value for tag, value, step in curves if tag == "digits/loss"}
    assert len(losses) == 4
    assert losses[int(first["round"])] == first["loss"]
    assert sum("curves cannot be written" in line for line in caplog.messages) == 1


def test_the_numbers_of_fragments_are_added_up() -> None:
    def work(peer: SimulatedPeer, index: int) -> dict[str, float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 10)
        curves = Listed()
        with peer.join("parts", model) as run:
            TensorBoard(run, curves)
            with DiLoCo(run, every=2, fragments=2, wait_for=1) as group:
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                while group.epoch < 2:
                    model(torch.ones(1, 30)).sum().backward()
                    run.report(loss=1.0)
                    optimizer.step()
            assert {value for tag, value, _ in curves if tag == "parts/loss"} == {1.0}
            return run.metrics()

    assert [one is not None and one["rounds_counted"] >= 4 for one in simulate(work, 2)] == [True, True]


@pytest.mark.slow
def test_tensorboard_and_wandb_hold_what_the_trainers_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = pytest.importorskip("torch.utils.tensorboard")
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    seen: list[tuple[int, float]] = []
    writer = board.SummaryWriter(str(tmp_path / "board"))

    def watch(run: Run) -> None:
        def ended() -> None:
            seen.append((int(run.metrics()["round"]), run.metrics()["loss"]))
            assert wandb.run.summary["digits/loss"] == pytest.approx(seen[-1][1])

        TensorBoard(run, writer)
        WandB(run)
        run.core.listeners.append(ended)

    simulate(lambda peer, index: train(peer, index, watch if index == 0 else lambda run: None), 2)
    writer.close()
    wandb.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board")).Reload().Scalars("digits/loss")
    assert [(one.step, one.value) for one in events] == [(at, pytest.approx(loss)) for at, loss in seen]
    assert len(seen) == 4
