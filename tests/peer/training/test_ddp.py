"""One machine with several processes is one peer: two ranks under gloo, as real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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


def ranks(folder: Path, *scenarios: str) -> list[subprocess.CompletedProcess[str]]:
    """What both ranks said, who went through these scenarios one after another."""
    command = [sys.executable, str(SCRIPT)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(folder), *scenarios],
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


class Ran(NamedTuple):
    """Both ranks after their end: where their results are, and what they said."""

    folder: Path
    done: list[subprocess.CompletedProcess[str]]

    def results(self, scenario: str) -> list[Tensors]:
        first, second = self.done
        assert [one.returncode for one in self.done] == [0, 0], first.stderr[-3000:] + second.stderr[-3000:]
        return [load_file(self.folder / f"{scenario}-{rank}.safetensors") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two processes for all scenarios: to start them takes longer than to run them. The last one breaks."""
    folder = tmp_path_factory.mktemp("ranks")
    return Ran(folder, ranks(folder, "hook", "shared", "broken"))


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


def test_backward_leaves_the_swarms_mean_on_every_rank_after_one_round(ran: Ran) -> None:
    assert_means(ran.results("hook"), failed=None)


@pytest.mark.slow
def test_a_round_that_failed_leaves_the_machines_own_mean(tmp_path: Path) -> None:
    assert_means(Ran(tmp_path, ranks(tmp_path, "failed")).results("failed"), failed=1)


def assert_means(results: list[Tensors], failed: int | None) -> None:
    first, second = results
    wanted = expected(failed)
    assert first.pop("rounds") == STEPS
    assert first["buckets"] > 2
    assert set(first) == {*wanted, "buckets"}
    for name, gradient in wanted.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], gradient, rtol=1e-4, atol=1e-6)


def test_an_error_of_rank_0_ends_the_others_too(ran: Ran) -> None:
    first, second = ran.done
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


def test_a_shared_optimizer_keeps_ranks_and_peers_alike(ran: Ran) -> None:
    first, second = ran.results("shared")
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
