"""Local steps: loops that end between two exchanges say so, and tensors that no optimizer follows are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from equipoise.averaging.schema import SchemaError
from equipoise.peer import Refused
from equipoise.peer.training import DiLoCo, Federated, Gossip, LocalSGD
from equipoise.peer.training.federated import Task
from equipoise.peer.training.local import LocalTraining
from equipoise.peer.training.member import Finished
from fakes.world import World


def ended(steps: tuple[int, ...], **options: Any) -> list[tuple[Finished, list[float], list[float]]]:
    """The ends of peers with so many steps of sizes 1, 3, ...: how each ended, its parameters, its agreed values."""
    swarm = World()

    def work(index: int) -> Any:
        own = {name: torch.nn.Parameter(torch.zeros(300)) for name in "ab"}
        sgd = torch.optim.SGD(own.values(), lr=1.0)
        run = swarm.join(f"peer{index}", "ends", own)
        with LocalSGD(run, **options) as group:
            for _ in range(steps[index]):
                swarm.compute(0.5)
                for one in own.values():
                    one.grad = torch.full_like(one, -1.0 - 2 * index)
                sgd.step()
        agreed = {name: float(one[0]) for part in group._fragments for name, one in part.model.values.items()}
        return group.finished, [float(one[0]) for one in own.values()], [agreed[name] for name in own]

    return swarm.each(len(steps), work)


def test_steps_since_the_last_exchange_are_named_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for (end, model, agreed), by in zip(ended((15, 15), every=10), (1, 3), strict=True):
        assert end == Finished(False, "5 steps of its own since exchange 1")
        assert (model, agreed) == ([20.0 + 5 * by] * 2, [20.0] * 2)
    assert "run ends: it does not end with the group: 5 steps of its own since exchange 1" in caplog.text


def test_loops_of_other_lengths_say_which_of_them_ends_between_two_exchanges() -> None:
    (first, own, agreed), (second, model, alike) = ended((95, 108), every=10)
    assert first == Finished(False, "5 steps of its own since exchange 9")
    assert (own, agreed) == ([185.0] * 2, [180.0] * 2)
    # The first has left: the other looks for company for ten seconds before it makes exchanges alone.
    assert second == Finished(False, "18 steps of its own since exchange 9")
    assert (model, alike) == ([234.0] * 2, [180.0] * 2)


@pytest.mark.parametrize("options", [{}, {"merge": 0.5}, {"delay": 3}], ids=str)
def test_loops_that_end_with_an_exchange_end_with_the_agreed_values(options: dict[str, Any]) -> None:
    for end, model, agreed in ended((20, 20), every=10, **options):
        assert end.in_step, end.reason
        # With `delay`, the three steps during the first exchange are given up.
        assert model == agreed == [34.0 if "delay" in options else 40.0] * 2


def test_what_streams_names_the_steps_of_the_part_that_was_exchanged_first() -> None:
    for end, model, agreed in ended((20, 20), every=10, fragments=2):
        assert end == Finished(False, "5 steps of its own since exchange 2")
        assert sorted(one - other == 0 for one, other in zip(model, agreed, strict=True)) == [False, True]


def test_a_kept_share_of_steps_that_no_exchange_has_is_named() -> None:
    for end, _, _ in ended((23, 23), every=10, delay=3, merge=0.5):
        assert end == Finished(False, "3 steps of its own since exchange 2")


@pytest.mark.parametrize("kind", [DiLoCo, LocalSGD])
@pytest.mark.parametrize("tensors", ["state_dict", "no leaves", "frozen"])
def test_tensors_that_no_optimizer_steps_are_refused(kind: type[DiLoCo], tensors: str) -> None:
    model, swarm = torch.nn.Linear(3, 2), World()
    given: Any = {
        "state_dict": model.state_dict(),
        "no leaves": {name: one * 1 for name, one in model.named_parameters()},
        "frozen": model.requires_grad_(tensors != "frozen"),
    }
    run = swarm.join("peer", "detached", given[tensors])
    with pytest.raises(
        Refused, match=r"no optimizer steps the tensors of run 'detached'.* module or its param"
    ):
        kind(run, every=5)
    assert not run.core.loop.by


def test_gossip_over_a_state_dict_is_refused() -> None:
    run = World().join("peer", "detached", torch.nn.Linear(3, 2).state_dict(), strategy="gossip")
    with pytest.raises(Refused, match="no optimizer steps the tensors of run 'detached'"):
        Gossip(run, every=5)


def test_a_loop_whose_optimizer_holds_other_tensors_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 2)
    group: LocalTraining[Finished] = LocalSGD(World().join("peer", "masters", model), every=5)
    masters = [one.detach().clone().requires_grad_() for one in model.parameters()]
    with group:
        torch.optim.SGD(masters).step()
    assert "run masters: no optimizer over the joined tensors has made a step" in caplog.text


def replaced(swap: Callable[[torch.nn.Module, torch.optim.Optimizer], torch.optim.Optimizer]) -> list[Any]:
    """Two loops of 21 steps, of which both replace something after the seventh; how each ended, and its parameter."""
    swarm = World()

    def work(index: int) -> Any:
        own = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(300))})
        used: list[torch.optim.Optimizer] = [torch.optim.SGD(own.values(), lr=1.0)]
        try:
            with LocalSGD(swarm.join(f"peer{index}", "ends", own), every=5) as group:
                for step in range(21):
                    swarm.compute(0.5)
                    if step == 7:
                        used.append(swap(own, used[0]))
                    own["a"].grad = torch.full_like(own["a"], -1.0 - 2 * index)
                    used[-1].step()
            return group.finished, float(own["a"].detach()[0]), group.epoch
        except SchemaError as error:
            return str(error)

    return swarm.each(2, work)


def test_an_optimizer_that_replaces_the_loops_is_followed() -> None:
    """The loop used to be followed no more, and made no exchange, as long as the first optimizer lived."""
    ends = replaced(lambda own, used: torch.optim.SGD(own.parameters(), lr=1.0))
    # Its first step tells two optimizers that step in turn from it, and is counted by none.
    assert ends == [(Finished(True, "its state is the group's"), 42.0, 4)] * 2


@pytest.mark.parametrize("renewed", [False, True])
def test_other_tensors_in_the_place_of_the_followed_ones_are_refused(renewed: bool) -> None:
    def swap(own: torch.nn.Module, used: torch.optim.Optimizer) -> torch.optim.Optimizer:
        own.load_state_dict({"a": torch.zeros(300)}, assign=True)
        return torch.optim.SGD(own.parameters(), lr=1.0) if renewed else used

    assert replaced(swap) == ["tensor 'a' is another tensor than at the start: join again with it"] * 2


def test_other_tensors_that_fit_puts_into_the_model_are_refused() -> None:
    swarm = World(strategy="federated")

    def work(index: int) -> str:
        model = torch.nn.Linear(2, 3)

        def fit(task: Task) -> tuple[float, dict[str, float]]:
            swarm.compute(1.0)
            moved = {name: one + 1 for name, one in model.state_dict().items()}
            model.load_state_dict(moved, assign=task.number == 2)
            return 1.0, {}

        run = swarm.join(f"peer{index}", "rounds", model)
        with pytest.raises(SchemaError) as error:
            Federated(run, fit, rounds=3).run()
        return str(error.value)

    assert (
        swarm.each(2, work) == ["tensor 'weight' is another tensor than at the start: join again with it"] * 2
    )


def statistics(swarm: World, averaged: bool, **options: Any) -> list[torch.nn.Module]:
    """Models of two peers whose batches have other means, after an exchange."""
    models: list[torch.nn.Module] = [
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())

    def work(index: int) -> None:
        chance = torch.Generator().manual_seed(index)
        sgd = torch.optim.SGD(models[index].parameters(), lr=0.1)
        run = swarm.join(f"peer{index}", "statistics", models[index])
        with LocalSGD(run, every=4, buffers=averaged, **options):
            for _ in range(12):
                swarm.compute(0.5)
                sgd.zero_grad()
                models[index](torch.randn(8, 2, generator=chance) + index).square().mean().backward()
                sgd.step()

    swarm.each(2, work)
    return models


@pytest.mark.parametrize("fragments", [1, 2])
def test_statistics_are_averaged_where_buffers_are(fragments: int) -> None:
    one, other = statistics(World("int8"), True, fragments=fragments)
    for name in ("1.running_mean", "1.running_var"):
        own, theirs = one.state_dict()[name], other.state_dict()[name]
        assert torch.equal(own, theirs) == (fragments == 1)
        # A fragment's exchange of the statistics may be two steps ago.
        assert float((own - theirs).abs().max()) < 0.5


def test_a_model_whose_statistics_stay_each_peers_own_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    one, other = statistics(World(), False)
    assert not torch.equal(one[1].running_mean, other[1].running_mean)  # type: ignore[index, arg-type]
    told = "run statistics: each peer keeps its own buffers (2, such as '1.running_mean')"
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert [line.startswith(told) for line in warnings] == [True] * 2


def test_statistics_of_a_mapping_are_not_known() -> None:
    run = World().join("peer", "mapping", {"w": torch.nn.Parameter(torch.zeros(3))})
    with pytest.raises(SchemaError, match=r"expected an nn\.Module, whose buffers are known"):
        LocalSGD(run, every=4, buffers=True)
