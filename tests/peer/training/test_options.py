"""A misspelt option is an error for mypy, and at run time one that names the option and the closest known one."""

# mypy: warn-unused-ignores

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_type_hints

import pytest

from equipoise.peer.training import DiLoCo, FederatedOptions, LocalOptions, LocalSGD, Options
from equipoise.peer.training.options import LocalKeywords, OptionKeywords
from fakes.trainers import adamw
from fakes.world import World
from oracles.training import network


def test_of_an_optimizer(world: World) -> None:
    model = network()
    run = world.join("peer0", "text", model)
    adam = adamw(model.parameters())
    # mypy reports each of these, or the comment that ignores it.
    with pytest.raises(
        TypeError, match="unknown option 'target_batchsize'; did you mean 'target_batch_size'"
    ):
        run.optimizer(adam, target_batchsize=64)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown option 'checkpoint'; did you mean 'checkpoints'"):
        run.optimizer(adam, target_batch_size=64, checkpoint=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown option 'momentum'; known are alone, batch_size, buffers, "):
        run.optimizer(adam, target_batch_size=64, momentum=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^run\.optimizer\(\.\.\.\) needs target_batch_size=$"):
        run.optimizer(adam)  # type: ignore[call-arg]
    assert not run.core.loop.by


@pytest.mark.parametrize("kind", [Options, LocalOptions, FederatedOptions])
def test_help_tells_every_option(kind: type) -> None:
    told = inspect.getdoc(kind)
    assert told is not None
    assert [one.name for one in fields(kind) if f"\n    {one.name}: " not in told] == []
    assert "\n\n\n" not in told


def test_of_local_steps(world: World) -> None:
    run = world.join("peer0", "text", network())
    with pytest.raises(TypeError, match="unknown option 'fragment'; did you mean 'fragments'"):
        DiLoCo(run, every=6, fragment=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown option 'waitfor'; did you mean 'wait_for'"):
        LocalSGD(run, every=6, waitfor=1)  # type: ignore[call-arg]
    for trainer in (DiLoCo, LocalSGD):
        with pytest.raises(TypeError, match="unknown option 'evry'; did you mean 'every'"):
            trainer(run, evry=6)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="every: expected a whole number of steps >= 1, got 0"):
            trainer(run)
    assert not run.core.loop.by


def test_the_keywords_are_the_options() -> None:
    """What mypy is told is what there is at run time."""
    assert get_type_hints(OptionKeywords) == get_type_hints(Options)
    local = get_type_hints(LocalOptions)
    assert local.pop("every") is int
    assert get_type_hints(LocalKeywords) == local


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fragments", "2"),
        ("fragments", 1.5),
        ("patience", -1),
        ("timeout", "30"),
        ("merge", None),
        ("weight", True),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected .*, got {value!r}"):
        LocalOptions(**{"every": 6, name: value})
