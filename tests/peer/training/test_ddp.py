"""What rank 0 shares with the other ranks; two ranks under gloo are in `tests/e2e/test_trainers.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.averaging.state import StateId
from equipoise.peer.training import ddp
from oracles.training import network


def test_another_state_of_the_same_epoch_is_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(ddp, "_broadcast", lambda tensor, group: sent.append(tensor))
    swarm: Any = SimpleNamespace(id=StateId(3, "a" * 64), step=lambda samples: None)
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
