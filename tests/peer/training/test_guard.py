"""Steps that are probes, and writes to the state of a swarm between two updates."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.averaging.schema import SchemaError
from equipoise.peer import Refused
from equipoise.peer.training import LocalSGD
from equipoise.peer.training.guard import bit_sums
from fakes.trainers import SAMPLES, Trainer, adamw, assert_alike
from fakes.world import World
from oracles.training import batch_of, loss_of, network

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

Act = Callable[["Scripted"], None]


def nothing(trainer: Scripted) -> None:
    pass


class Scripted(Trainer):
    """One whose script does something of its own before its backward pass."""

    def __init__(self, *given: Any, act: Act = nothing, at: range = range(4, 5), **options: Any) -> None:
        super().__init__(*given, **{"target_batch_size": 2 * SAMPLES, **options})
        self.act, self.at = act, at

    def backward(self) -> None:
        if self.calls in self.at:
            self.act(self)
        super().backward()


def two(world: World, act: Act, both: bool = False, epochs: int = 12, **options: Any) -> list[Scripted]:
    """Two trainers; the first, or both, act."""
    acts = (act, act if both else nothing)
    trainers = [Scripted(world, index, epochs, act=acts[index], **options) for index in range(2)]
    world.run(*trainers)
    return trainers


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What scripts were told; daemons log beside them here."""
    told = (record for record in caplog.records if not record.name.startswith("equipoise.averaging"))
    return [record.getMessage() for record in told if record.levelname == "WARNING"]


# ---- probes ----


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def warming(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(epoch / 3, 1.0))


def saves(trainer: Scripted) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    trainer.opt.zero_grad()
    get_optimizer_state_dict(trainer.model, trainer.opt)


def restores(trainer: Scripted) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    trainer.opt.zero_grad()
    state = get_optimizer_state_dict(trainer.model, trainer.opt)
    set_optimizer_state_dict(trainer.model, trainer.opt, state)


@pytest.mark.parametrize("act", [saves, restores])
@pytest.mark.parametrize("scheduler", [None, warming])
@pytest.mark.parametrize(("make", "at"), [(adamw, 0), (sgd, 0), (sgd, 3)], ids=["adamw", "sgd", "sgd later"])
def test_a_probe_of_torchs_checkpoints_is_no_step(
    world: World, caplog: pytest.LogCaptureFixture, act: Act, scheduler: Any, make: Any, at: int
) -> None:
    def probes(trainer: Scripted) -> None:
        opt = trainer.opt
        before = opt.id, opt.member.accumulated, opt.image(), world.rounds, world.now
        act(trainer)
        assert (opt.id, opt.member.accumulated) == before[:2]
        assert torch.equal(opt.image(), before[2])
        assert (world.rounds, world.now) == before[3:]

    trainers = [
        Scripted(world, index, 6, act=nothing if index else probes, at=range(at, at + 1), scheduler=scheduler)
        for index in range(2)
    ]
    for trainer in trainers:
        trainer.make = make
        trainer.begin()
    world.run()
    assert_alike(trainers)
    assert trainers[0].last.contributors == {"peer0": SAMPLES, "peer1": SAMPLES}
    assert trainers[0].calls == trainers[1].calls
    assert warned(caplog) == []


def test_a_step_without_gradients_gives_nothing(world: World) -> None:
    def steps(trainer: Scripted) -> None:
        trainer.opt.zero_grad()
        trainer.opt.step()
        assert trainer.opt.member.accumulated == 0

    trainers = two(world, steps, at=range(1))
    assert_alike(trainers)
    assert trainers[0].last.contributors == {"peer0": SAMPLES, "peer1": SAMPLES}


def test_a_probe_is_no_local_step(world: World) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, steps = network(), []

    def work() -> None:
        run = world.join("peer0", "text", model)
        inner = adamw(model.parameters())
        with LocalSGD(run, every=10) as group:
            get_optimizer_state_dict(model, inner)
            steps.append(group.steps)
            loss_of(model, batch_of(0, 0, SAMPLES)).backward()
            inner.step()
            steps.append(group.steps)

    world.peer("peer0", work)
    world.run()
    assert steps == [0, 1]


# ---- writes ----


@torch.no_grad()
def clamps(trainer: Scripted) -> None:
    trainer.model[2].weight.clamp_(-0.05, 0.05)


def decays_by_data(trainer: Scripted) -> None:
    trainer.model[2].weight.data.mul_(0.9)


@torch.no_grad()
def permutes(trainer: Scripted) -> None:
    trainer.model[0].weight.copy_(trainer.model[0].weight.flip(0))


def loads(trainer: Scripted) -> None:
    trainer.model.load_state_dict(network(seed=1).state_dict())


def remembers(trainer: Scripted) -> None:
    state = copy.deepcopy(trainer.opt.state_dict())
    state["state"][0]["exp_avg"] += 1
    trainer.opt.load_state_dict(state)


@torch.no_grad()
def rewrites_memory(trainer: Scripted) -> None:
    trainer.opt.inner.state[trainer.model[0].weight]["exp_avg"].zero_()


def forgets(trainer: Scripted) -> None:
    trainer.opt.inner.state.clear()


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (rewrites_memory, "the optimizer's state"),
        (forgets, "the optimizer's state"),
        (clamps, "'2.weight'"),
        (decays_by_data, "'2.weight'"),
        (permutes, "'0.weight'"),
        (loads, "'0.weight'"),
        (remembers, "the optimizer's state"),
    ],
)
def test_a_peer_that_writes_says_so_and_takes_on_the_groups_state(
    world: World, caplog: pytest.LogCaptureFixture, act: Act, named: str
) -> None:
    writer, other = two(world, act)
    assert_alike([writer, other])
    assert writer.seen[4][1].startswith("it caught up with the group at epoch 6")
    [told] = warned(caplog)
    assert f"the script has written to {named} since the last update, so this state is nobody else's" in told
    assert "load_state_dict" in told
    # Nobody else is harmed: it keeps its state, and goes on.
    assert {told for _, told in other.seen} == {"its state is the group's"}


def test_a_write_to_a_frozen_parameter_is_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    @torch.no_grad()
    def merges(trainer: Scripted) -> None:
        trainer.model[0].weight.mul_(0.5)

    trainers = [Scripted(world, index, 8, act=act) for index, act in enumerate((merges, nothing))]
    for trainer in trainers:
        trainer.model[0].weight.requires_grad_(False)
        trainer.begin()
    world.run()
    [told] = warned(caplog)
    assert "the script has written to frozen tensors, first to '0.weight'" in told


def test_peers_that_all_write_the_same_go_on_together(world: World) -> None:
    trainers = two(world, clamps, both=True)
    assert_alike(trainers)
    assert float(trainers[0].model[2].weight.detach().abs().max()) < 0.2
    seen = [told for trainer in trainers for _, told in trainer.seen]
    assert not any("behind: " in told for told in seen)


def test_what_all_load_before_the_first_step_is_what_they_begin_with(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    trainers = two(world, loads, both=True, at=range(1))
    assert_alike(trainers)
    assert warned(caplog) == []


def test_what_an_optimizer_remembers_at_the_start_is_part_of_the_state(world: World) -> None:
    first, second = Scripted(world, 0, 1), Scripted(world, 1, 1)
    for parameter in second.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(second.model.state_dict())
    used = adamw(second.model.parameters())
    used.step()
    second.model.load_state_dict(before)
    second.make = lambda parameters: used
    for trainer in (first, second):
        trainer.join()
    assert first.opt.id != second.opt.id


def test_a_swap_that_is_undone_is_no_write(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def swaps(trainer: Scripted) -> None:
        own = copy.deepcopy(trainer.model.state_dict())
        loads(trainer)
        trainer.model.load_state_dict(own)

    trainers = two(world, swaps, at=range(2, 8))
    assert_alike(trainers)
    assert {trainer.calls for trainer in trainers} == {12}
    assert warned(caplog) == []


def test_a_peer_that_writes_before_each_step_is_refused_and_the_other_goes_on(world: World) -> None:
    errors: list[str] = []

    class Writing(Scripted):
        def train(self) -> None:
            try:
                super().train()
            except Refused as error:
                errors.append(str(error))

    trainers = [Writing(world, 0, 40, act=decays_by_data, at=range(4, 999)), Scripted(world, 1, 40)]
    world.run(*trainers)
    assert errors == [
        "the script has written to its parameters 3 times without an update; "
        "write in on_update= alone, alike on all peers"
    ]
    assert trainers[1].opt.epoch == 40


def test_a_write_after_the_last_step_is_not_the_groups_state(world: World) -> None:
    class Exporting(Scripted):
        def train(self) -> None:
            super().train()
            self.model.half()
            self.ended = self.opt.finish()

    trainers = [Exporting(world, index, 5) for index in range(2)]
    world.run(*trainers)
    assert [trainer.ended.in_step for trainer in trainers] == [False] * 2
    assert trainers[0].ended.reason.startswith("the script has written to '0.weight' since the last update")
    assert not trainers[0].opt.member.whole  # No checkpoint is made of it.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_peer_whose_dtype_changed_is_refused_and_the_other_goes_on(
    world: World, dtype: torch.dtype
) -> None:
    errors: list[str] = []

    class Converting(Scripted):
        def train(self) -> None:
            try:
                super().train()
            except SchemaError as error:
                errors.append(str(error))

        def backward(self) -> None:
            if self.calls == 4:
                self.model.to(dtype)
                self.calls += 1
                self.opt.step()
            super().backward()

    trainers = [Converting(world, 0, 70), Scripted(world, 1, 70)]
    world.run(*trainers)
    assert errors == [
        f"tensor '0.weight': expected torch.float32 on cpu, as at the start, got {dtype} on cpu; "
        "convert or move the model before join"
    ]
    assert trainers[1].opt.epoch == 70
    assert not any("behind: " in told for _, told in trainers[1].seen)


def test_another_tensor_in_the_place_of_a_parameter_is_refused(world: World) -> None:
    trainer = Scripted(world, 0, 1)
    trainer.join()
    trainer.model[0].weight = nn.Parameter(trainer.model[0].weight.detach().clone())
    with pytest.raises(SchemaError, match=r"tensor '0\.weight' is another tensor than at the start"):
        trainer.opt.step()


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize("scheduler", [None, halving])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_changed_hyperparameter_is_taken_back(
    world: World, caplog: pytest.LogCaptureFixture, scheduler: Any, as_tensor: bool, key: str
) -> None:
    def changes(trainer: Scripted) -> None:
        state = copy.deepcopy(trainer.opt.state_dict())
        state["param_groups"][0][key] = torch.tensor(0.5) if as_tensor else 0.5
        trainer.opt.load_state_dict(state)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.01) if as_tensor else 0.01, foreach=False)

    trainers = [
        Scripted(world, index, 8, act=nothing if index else changes, scheduler=scheduler)
        for index in range(2)
    ]
    for trainer in trainers:
        trainer.make = make
        trainer.begin()
    world.run()
    assert_alike(trainers)
    assert {trainer.calls for trainer in trainers} == {8}
    [told] = warned(caplog)
    assert f"the script changed a hyperparameter, group 0: {key}: 0.0" in told
    assert "became 0.5, and it is taken back" in told


def test_an_embedding_that_writes_in_its_forward_pass_is_refused(world: World) -> None:
    trainer = Scripted(world, 0, 1)
    trainer.model = nn.Sequential(nn.Embedding(50, 16, max_norm=1.0), nn.Linear(16, 4))
    with pytest.raises(Refused, match=r"'0' has max_norm: its forward pass writes its weight"):
        trainer.join()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 8), (5, 7)])
def test_the_sum_over_bits_tells_one_changed_value(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones((*shape, 2), dtype=dtype).movedim(-1, 0)[0]  # With strides of its own.
    for one in (tensor, tensor.contiguous(), torch.ones(99, dtype=dtype)[1 : 1 + tensor.numel()]):
        before = bit_sums({"one": one})
        assert bit_sums({"one": one}) == before
        if one.numel():
            one[(-1,) * one.dim()] = not one[(-1,) * one.dim()]
            assert bit_sums({"one": one}) != before


@pytest.mark.parametrize("rows", [7, 2048])
def test_the_sum_over_bits_tells_rows_that_change_places(rows: int) -> None:
    tensor = torch.arange(rows * 64.0).view(rows, 64)
    assert bit_sums({"tensor": tensor}) != bit_sums({"tensor": tensor.flip(0)})


# ---- updates ----


class Averaging(Scripted):
    """A trainer with an average of the weights, as its optimizer's `extra`."""

    def __init__(self, *given: Any, by_loop: bool = False, **options: Any) -> None:
        super().__init__(*given, **options)
        self.shadow = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.epochs_seen: list[int] = []
        self.options["extra"] = {"shadow": self.shadow}
        if not by_loop:
            self.options["on_update"] = self.update

    def update(self) -> None:
        self.epochs_seen.append(self.opt.epoch)
        self.shadow.update_parameters(self.model)


def test_on_update_is_called_once_for_each_update_also_of_newcomers_and_stragglers(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Sleeping(Averaging):
        def backward(self) -> None:
            if self.calls == 10:
                self.swarm.compute(8.0)
            super().backward()

    target = {"target_batch_size": 4 * SAMPLES}
    trainers = [
        Averaging(world, 0, 40, **target),
        Averaging(world, 1, 40, **target),
        Sleeping(world, 2, 40, **target),
    ]
    newcomer = Averaging(world, 3, 40, **target)
    for trainer in trainers:
        trainer.begin()
    newcomer.begin(at=6.0)
    world.run()
    assert_alike([*trainers, newcomer])  # The image holds the shadow too.
    assert {int(trainer.shadow.n_averaged) for trainer in (*trainers, newcomer)} == {40}
    assert trainers[0].epochs_seen == list(range(1, 41))
    assert trainers[2].epochs_seen == list(range(1, 41))
    assert warned(caplog) == []


def test_extra_state_that_the_loop_changes_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Natural(Averaging):
        def backward(self) -> None:
            if self.opt.epoch:
                self.shadow.update_parameters(self.model)
            super().backward()

    Natural(world, 0, 4, patience=0, by_loop=True, target_batch_size=SAMPLES).begin()
    world.run()
    [told] = warned(caplog)
    assert "extra state 'shadow' has changed outside of on_update=" in told


def test_weights_clipped_in_on_update_stay_alike(world: World, caplog: pytest.LogCaptureFixture) -> None:
    trainers = [Scripted(world, index, 6) for index in range(2)]
    for trainer in trainers:
        trainer.options["on_update"] = lambda trainer=trainer: clamps(trainer)
        trainer.begin()
    world.run()
    assert_alike(trainers)
    assert {trainer.calls for trainer in trainers} == {6}
    assert float(trainers[0].model[2].weight.detach().abs().max()) == pytest.approx(0.05)
    assert warned(caplog) == []


# ---- one optimizer, one run ----


def test_one_torch_optimizer_for_two_runs_is_refused(world: World) -> None:
    model: Any = network()
    inner = adamw(model.parameters())
    first = world.join("peer0", "first", model)
    first.optimizer(inner, target_batch_size=8)
    with pytest.raises(Refused, match="got the one that steps run 'first'"):
        world.join("peer0", "second", model).optimizer(inner, target_batch_size=8)
    first.core.left = True
    world.join("peer0", "third", model).optimizer(inner, target_batch_size=8)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    kinds = torch.optim.lr_scheduler
    return kinds.ChainedScheduler([kinds.StepLR(optimizer, 3), kinds.ExponentialLR(optimizer, 0.99)])  # type: ignore[return-value]


@pytest.mark.parametrize("scheduler", [halving, falling])
def test_a_scheduler_that_the_loop_steps_too_is_taken_back(
    world: World, caplog: pytest.LogCaptureFixture, scheduler: Any
) -> None:
    """The rate need not change at that step: it used to change some epochs later, on this peer alone."""

    def steps(trainer: Scripted) -> None:
        assert trainer.opt.scheduler is not None
        trainer.opt.scheduler.step()

    trainers = two(world, steps, scheduler=scheduler)
    assert_alike(trainers)
    assert trainers[0].opt.param_groups[0]["lr"] == trainers[1].opt.param_groups[0]["lr"] < 0.01
    assert any("scheduler: its epoch, and it is taken back" in told for told in warned(caplog))


@pytest.mark.parametrize("later", [False, True])
def test_the_parameter_that_requires_gradients_only_now_or_no_more_is_named(
    world: World, later: bool
) -> None:
    model: Any = network()
    model[2].weight.requires_grad_(not later)
    run = world.join("peer0", "text", model)
    model[2].weight.requires_grad_(later)
    with pytest.raises(SchemaError, match=r"have changed since join: 2\.weight; join again"):
        run.accumulate(model)


def test_an_interrupted_update_is_no_write_of_the_script(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupted(Scripted):
        def join(self) -> None:
            super().join()
            step, interrupts = self.opt.step, [KeyboardInterrupt] * (self.index == 0)

            def updated() -> None:
                if self.opt.epoch == 4 and interrupts:
                    raise interrupts.pop()

            def steps() -> None:
                with contextlib.suppress(KeyboardInterrupt):
                    step()

            self.opt._options = dataclasses.replace(self.opt._options, on_update=updated)
            self.opt.step = steps  # type: ignore[method-assign, assignment]

    trainers = [Interrupted(world, index, 12) for index in range(2)]
    world.run(*trainers)
    assert_alike(trainers)
    assert any(told.startswith("an update was interrupted") for _, told in trainers[0].seen)
    assert warned(caplog) == []
