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
from fakes.ddp_rank import OTHER, RANKS, SAMPLES, STEPS
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
    return Ran(folder, ranks(folder, "shared", "broken"))


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
