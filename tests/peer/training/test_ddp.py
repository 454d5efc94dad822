"""One machine with several processes is one peer: two ranks under gloo, as real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from equipoise.averaging.state import StateId
from equipoise.peer.training import ddp
from fakes import ddp_rank
from fakes.ddp_rank import (
    OTHER,
    OTHERS_WEIGHT,
    RANKS,
    SAMPLES,
    STEPS,
    Branched,
    named,
    others_gradient,
)
from oracles.training import batch_of, joined, loss_of, network

SCRIPT = Path(ddp_rank.__file__)

Tensors = dict[str, torch.Tensor]


def ranks(folder: Path, scenario: str) -> list[subprocess.CompletedProcess[str]]:
    """What both ranks came to."""
    command = [sys.executable, str(SCRIPT)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(folder), scenario],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]
    try:
        told = [process.communicate(timeout=90) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(started, told, strict=True)
    ]


def results(folder: Path, scenario: str) -> list[Tensors]:
    done = ranks(folder, scenario)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr[-3000:] + done[1].stderr[-3000:]
    return [load_file(folder / f"{scenario}-{rank}.safetensors") for rank in range(RANKS)]


def expected(failed: int | None = None) -> Tensors:
    """The gradients of each step, computed in one process."""
    torch.manual_seed(0)
    model, found = Branched(), {}
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, joined([batch_of(rank, step, SAMPLES) for rank in range(RANKS)])).backward()
        for name, one in named(model).items():
            own = torch.zeros_like(one) if one.grad is None else one.grad
            weight = 0.0 if step == failed else OTHERS_WEIGHT
            total = own * RANKS * SAMPLES + others_gradient(name, step, one) * weight
            found[f"{step} {name}"] = total / (RANKS * SAMPLES + weight)
            with torch.no_grad():
                one.sub_(0.1 * found[f"{step} {name}"])
    return found


@pytest.mark.parametrize(
    ("scenario", "failed"), [("hook", None), pytest.param("failed", 1, marks=pytest.mark.slow)]
)
def test_backward_leaves_the_swarms_mean_on_every_rank_after_one_round(
    tmp_path: Path, scenario: str, failed: int | None
) -> None:
    first, second = results(tmp_path, scenario)
    wanted = expected(failed)
    assert first.pop("rounds") == STEPS
    assert first["buckets"] > 2
    assert set(first) == {*wanted, "buckets"}
    for name, gradient in wanted.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], gradient, rtol=1e-4, atol=1e-6)


def test_an_error_of_rank_0_ends_the_others_too(tmp_path: Path) -> None:
    first, second = ranks(tmp_path, "broken")
    assert "the daemon has gone" in first.stdout + first.stderr
    assert "rank 0 could not step" in second.stdout + second.stderr


def test_another_state_of_the_same_epoch_is_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(ddp, "_broadcast", lambda tensor, group: sent.append(tensor))
    swarm: Any = SimpleNamespace(id=StateId(3, "a" * 64), step=lambda: None)
    model: Any = SimpleNamespace(module=network())
    shared = ddp.SharedOptimizer(swarm, model)
    parameters = len(list(model.module.parameters()))
    assert len(sent) == 1 + parameters
    shared.step()
    assert len(sent) == 2 + parameters, "nothing has changed"
    swarm.id = StateId(3, "b" * 64)
    shared.step()
    assert len(sent) == 3 + 2 * parameters
    assert shared.epoch == 3


def test_a_shared_optimizer_keeps_ranks_and_peers_alike(tmp_path: Path) -> None:
    first, second = results(tmp_path, "shared")
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        inner.zero_grad()
        loss_of(model, joined([batch_of(peer, step, SAMPLES) for peer in (*range(RANKS), OTHER)])).backward()
        inner.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name], first[f"other {name}"]), name
        torch.testing.assert_close(first[name], parameter.detach(), rtol=1e-4, atol=1e-5)
