"""Schedulers that others made, made to follow the swarm."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, ReduceLROnPlateau, StepLR

from equipoise.peer.training.adapters.schedule import paced, progress


def made(kind: type[LRScheduler] = ExponentialLR) -> tuple[SGD, LRScheduler]:
    inner = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return inner, kind(inner, 0.5)  # type: ignore[call-arg]


def test_only_the_swarm_steps_it() -> None:
    inner, scheduler = made()
    schedule = paced(scheduler)
    assert schedule is not None
    ours = schedule(inner)
    inner.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 1.0
    ours.step()
    assert inner.param_groups[0]["lr"] == 0.5
    assert scheduler.get_last_lr() == [0.5]


def test_its_state_is_what_it_was_and_can_be_pickled() -> None:
    _, plain = made()
    inner, scheduler = made()
    schedule = paced(scheduler)
    assert schedule is not None
    assert scheduler.state_dict() == plain.state_dict() == schedule(inner).state_dict()
    pickle.dumps(scheduler.state_dict())
    assert isinstance(scheduler, ExponentialLR)


def test_a_state_can_be_taken_on() -> None:
    inner, scheduler = made()
    schedule = paced(scheduler)
    assert schedule is not None
    ours = schedule(inner)
    ours.load_state_dict({**ours.state_dict(), "last_epoch": 7})
    assert scheduler.last_epoch == 7


def test_progress_counts_what_was_made_before_a_training_goes_on_from_a_file() -> None:
    inner, scheduler = made()
    schedule = paced(scheduler)
    assert schedule is not None
    ours = schedule(inner)
    optimizer: Any = SimpleNamespace(epoch=2, scheduler=ours)
    ours.load_state_dict({**ours.state_dict(), "last_epoch": 5})
    assert progress(optimizer) == 5
    optimizer.scheduler = None
    assert progress(optimizer) == 2


def test_none_is_none() -> None:
    assert paced(None) is None


@pytest.mark.parametrize("kind", [ReduceLROnPlateau, str])
def test_what_does_not_count_steps_is_refused(kind: type) -> None:
    inner, _ = made(lambda inner, factor: StepLR(inner, 1))
    scheduler = kind(inner)
    with pytest.raises(TypeError, match=f"expected a scheduler that counts steps, got {kind.__name__}"):
        paced(scheduler)
