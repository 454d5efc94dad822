"""`Run.optimizer`: many peers, one optimizer."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.averaging.matchmaking.spec_diff import answer_of, differences
from equipoise.averaging.outcome import NoPeers
from equipoise.averaging.spec import RunSpec
from equipoise.peer import Refused
from equipoise.peer.purposes import STEP, agreed_spec, run_specs
from equipoise.peer.training import DiLoCo, ImageError
from fakes.trainers import SAMPLES, Trainer, adamw, assert_alike, trained
from fakes.world import World
from oracles.training import batch_of, difference, loss_of, network, train_whole

CODECS = ["fp32", "fp16", "bf16", "int8"]


@pytest.mark.parametrize("codec", CODECS)
def test_all_peers_end_alike_under_every_codec(codec: str) -> None:
    trainers = trained(World(codec))
    assert trainers[0].opt.epoch == 5
    assert_alike(trainers)
    assert difference(trainers[0].named(), dict(network().named_parameters())) > 0.01


@pytest.mark.parametrize("clip", [None, 0.5])
def test_peers_together_equal_one_process_with_the_whole_batch(world: World, clip: float | None) -> None:
    epochs = 20
    trainers = trained(world, epochs=epochs, clip=clip)
    whole = network()
    updates = [[batch_of(peer, at, SAMPLES) for peer in range(4)] for at in range(epochs)]
    train_whole(whole, adamw, updates, clip)
    assert_alike(trainers)
    assert difference(trainers[0].named(), dict(whole.named_parameters())) <= 1e-5


@pytest.mark.parametrize("half", ["0.weight", "1.running_var"])
def test_peers_meet_only_if_what_they_replicate_has_equal_dtypes(half: str) -> None:
    """They used to meet; the one never got a state of the other's, and counted as its company."""

    def spec_of(dtype: torch.dtype, local: bool) -> RunSpec:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        named[half].data = named[half].data.to(dtype)
        run = World().join("peer", "text", model)
        if local:
            DiLoCo(run, every=2)
        else:
            run.optimizer(adamw(model.parameters()), target_batch_size=8, buffers=True)
        assert run.core.agreed is not None
        told = run.core.agreed
        return agreed_spec(run_specs(run.core.request)[STEP], told.terms, told.buffers, told.dtypes)

    here, there = spec_of(torch.float32, False), spec_of(torch.bfloat16, False)
    line = differences(here, answer_of(there, here.marks, 0.0))
    assert re.match(rf"tensor \d: here '{half}' float32 .*, there '{half}' bfloat16 ", line), line
    # Local steps replicate fp32 copies, and peers of any dtypes train together.
    assert spec_of(torch.float32, True) == spec_of(torch.bfloat16, True)


def test_the_norm_of_tied_weights_counts_once(world: World) -> None:
    class Tied(Trainer):
        def join(self) -> None:
            self.model[2].weight = self.model[0].weight
            named = dict(self.model.named_parameters(remove_duplicate=False))
            self.before = self.model[0].weight.detach().clone()
            self.run = self.swarm.join(self.name, "text", named)
            sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
            self.opt = self.run.optimizer(sgd, clip=1.0, **self.options)

        def backward(self) -> None:
            self.model[0].weight.sum().mul(5.0).backward()

    trainers = [Tied(world, index, 1) for index in range(4)]
    for trainer in trainers:
        trainer.model = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
        trainer.model[1] = nn.Identity()
        trainer.begin()
    world.run()
    moved = (trainers[0].before - trainers[0].model[0].weight).detach()
    assert float(moved.norm()) == pytest.approx(1.0, rel=1e-5)


def test_a_slow_peer_contributes_what_it_has_and_the_quick_make_more(world: World) -> None:
    quick = [Trainer(world, index, 6).begin() for index in range(3)]
    slow = Trainer(world, 3, 6, seconds=2.6).begin()
    world.run()
    assert_alike([*quick, slow])
    assert slow.calls == 6
    gave = [(one.contributors["peer3"], one.contributors["peer0"]) for _, _, one in world.outcomes]
    assert (SAMPLES, 2 * SAMPLES) in gave


def test_peers_as_fast_as_each_other_make_the_target_and_no_more(world: World) -> None:
    trainers = trained(world, epochs=4)
    assert trainers[0].last.contributors == {trainer.name: SAMPLES for trainer in trainers}
    assert {trainer.calls for trainer in trainers} == {4}


@pytest.mark.parametrize("target", [SAMPLES, 3 * SAMPLES])
def test_a_target_below_one_micro_batch_of_all_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture, target: int
) -> None:
    trainers = [Trainer(world, index, 4, target_batch_size=target) for index in range(3)]
    trainers[2].options["batch_size"] = SAMPLES - 1
    world.run(*trainers)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    expected = (
        "run text: target_batch_size is 8, less than one micro-batch of each of 3 peers, so rounds have 23 samples: "
        "raise it, or make smaller batches"
    )
    assert told == ([expected] * 3 if target == SAMPLES else [])  # Once a peer.


def test_a_round_that_fails_keeps_what_was_accumulated(world: World) -> None:
    world.fails = lambda number, peer: number == 3
    trainers = trained(world, epochs=4)
    assert_alike(trainers)
    assert {trainer.calls for trainer in trainers} == {5}
    whole = network()
    updates = [[batch_of(peer, at, SAMPLES) for peer in range(4)] for at in range(5)]
    train_whole(whole, adamw, [updates[0], updates[1] + updates[2], *updates[3:]])
    assert difference(trainers[0].named(), dict(whole.named_parameters())) <= 1e-5


def test_delayed_means_are_applied_one_step_later_and_alike(world: World) -> None:
    world.net.latency = 0.05
    trainers = trained(world, epochs=10, delay=True)
    assert_alike(trainers)
    # Ten steps of half a second, one to collect the last, and the meeting: nobody waited for a round.
    assert world.now < 11 * 0.5 + 0.4 + 0.2


def test_without_delay_rounds_cost_their_time(world: World) -> None:
    world.net.latency = 0.05
    trained(world, epochs=10)
    assert world.now > 10 * (0.5 + 0.4)


def test_schedulers_follow_the_swarms_epoch(world: World) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    trainers = trained(world, epochs=4, scheduler=schedule)
    assert_alike(trainers)
    assert trainers[0].opt.param_groups[0]["lr"] == 1e-2 / 4


def test_a_micro_batch_that_is_not_finite_is_dropped(world: World) -> None:
    class Bursting(Trainer):
        def backward(self) -> None:
            super().backward()
            if self.index == 0 and self.calls == 2:
                next(iter(self.model.parameters())).grad.view(-1)[0] = torch.inf

    trainers = [Bursting(world, index, 5).begin() for index in range(4)]
    world.run()
    assert [trainer.opt.dropped for trainer in trainers] == [1, 0, 0, 0]
    assert_alike(trainers)


def test_a_mean_that_is_not_finite_is_skipped_by_all(world: World) -> None:
    class Spoiled(Trainer):
        def join(self) -> None:
            super().join()
            make = self.opt._make_step

            def spoiled(mean: dict[str, torch.Tensor]) -> None:
                if self.opt.epoch == 2:
                    next(iter(mean.values())).view(-1)[0] = torch.inf
                make(mean)

            self.opt._make_step = spoiled  # type: ignore[method-assign, assignment]

    trainers = [Spoiled(world, index, 4).begin() for index in range(4)]
    world.run()
    assert [trainer.opt.skipped for trainer in trainers] == [1] * 4
    assert_alike(trainers)
    assert int(trainers[0].opt.state[next(trainers[0].model.parameters())]["step"]) == 3


def test_grad_scaler_takes_it_for_an_optimizer(world: World) -> None:
    class Scaled(Trainer):
        def train(self) -> None:
            self.join()
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            while self.opt.epoch < self.epochs:
                self.swarm.compute(self.seconds)
                self.opt.zero_grad()
                loss = loss_of(self.model, batch_of(self.index, self.calls, SAMPLES))
                if self.index == 1 and self.calls == 2:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                self.calls += 1
                scaler.step(self.opt)
                scaler.update()

    scaled = [Scaled(world, index, 5).begin() for index in range(4)]
    world.run()
    assert_alike(scaled)
    assert scaled[1].calls > scaled[1].epochs  # Its own bad batch it left out before the swarm saw it.


class Mixed(nn.Module):
    """Frozen, tied, half-precision, sparse and unused parameters, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.narrow = nn.Linear(4, 4).bfloat16()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.narrow(self.embedding(rows).bfloat16()).float()
        return self.norm(self.second(self.first(self.frozen(hidden))))


class MixedTrainer(Trainer):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.model = Mixed()
        self.make = lambda parameters: torch.optim.SGD(
            [one for one in parameters if one.requires_grad], lr=0.1
        )

    def backward(self) -> None:
        rows = torch.tensor([self.index, self.index + 1, self.calls % 6])
        self.model(rows).square().sum().backward()


@pytest.mark.parametrize("buffers", [True, False])
def test_mixed_parameters(world: World, buffers: bool) -> None:
    start = Mixed()
    trainers = [MixedTrainer(world, index, 3, buffers=buffers).begin() for index in range(4)]
    world.run()
    assert_alike(trainers)
    models = [trainer.model for trainer in trainers]
    assert models[0].first.weight is models[0].second.weight
    for name in ("unused", "frozen"):
        assert torch.equal(getattr(models[0], name).weight, getattr(start, name).weight)
    assert not torch.equal(models[0].first.weight, start.first.weight)
    assert torch.equal(models[0].embedding.weight[8:], start.embedding.weight[8:])
    assert not torch.equal(models[0].embedding.weight[:4], start.embedding.weight[:4])
    assert [int(model.norm.num_batches_tracked) for model in models] == [3] * 4
    alike = [torch.equal(models[0].norm.running_mean, model.norm.running_mean) for model in models[1:]]
    assert alike == [buffers] * 3


def test_a_parameter_without_gradient_keeps_what_the_optimizer_remembers(world: World) -> None:
    class Some(MixedTrainer):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.make = adamw_dense

    def adamw_dense(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in parameters if one.requires_grad], lr=0.1, weight_decay=0.5)

    trainers = [Some(world, index, 3).begin() for index in range(2)]
    for trainer in trainers:
        trainer.model.embedding.sparse = False
        trainer.options["target_batch_size"] = 2 * SAMPLES
    world.run()
    assert_alike(trainers)
    model = trainers[0].model
    assert model.unused.weight not in trainers[0].opt.state
    assert torch.equal(model.unused.weight, Mixed().unused.weight)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_fused_steps_are_right_for_parameters_of_any_strides(name: str) -> None:
    """Fused kernels read gradient and moments by the strides of the parameter."""

    class Strided(Trainer):
        def __init__(self, *given: Any, fused: bool) -> None:
            super().__init__(*given)
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5))
            self.model[0].to(memory_format=torch.channels_last)
            self.model[2].weight = nn.Parameter(torch.randn(64, 5).t())
            self.make = lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1, fused=fused)

        def backward(self) -> None:
            rows = torch.randn(
                8, 3, 6, 6, generator=torch.Generator().manual_seed(10 * self.index + self.calls)
            )
            self.model(rows).square().sum().backward()

    found = []
    for fused in (True, False):
        swarm = World("fp32")
        trainers = [Strided(swarm, index, 3, fused=fused).begin() for index in range(4)]
        late = Strided(swarm, 4, 3, fused=fused).begin(at=0.9)
        swarm.run()
        assert_alike([*trainers, late])
        found.append(trainers[0].named())
    assert difference(*found) < 1e-5


def test_the_optimizer_may_hold_frozen_parameters(world: World) -> None:
    class All(MixedTrainer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)

    trainers = [All(world, index, 3).begin() for index in range(4)]
    late = All(world, 4, 3).begin(at=0.9)
    world.run()
    assert_alike([*trainers, late])
    assert torch.equal(late.model.frozen.weight, Mixed().frozen.weight)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_learning_rate_that_changes_by_a_scripts_own_steps_is_told(
    scheduled: bool, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Scheduling(Trainer):
        def backward(self) -> None:
            if not scheduled:
                self.opt.param_groups[0]["lr"] *= 0.9
            super().backward()

    schedule = torch.optim.lr_scheduler.ExponentialLR
    Scheduling(world, 0, 4, patience=0, scheduler=(lambda o: schedule(o, 0.9)) if scheduled else None).begin()
    world.run()
    told = [record.message for record in caplog.records if "given as scheduler=" in record.message]
    assert len(told) == (not scheduled)


def test_a_compiled_loop_runs_it_uncompiled(world: World) -> None:
    trainer, steps = Trainer(world, 0, 1, patience=0, target_batch_size=SAMPLES), []

    def train() -> None:
        trainer.join()
        trainer.backward()
        torch.compile(lambda: steps.append(trainer.opt.step()), backend="eager")()

    world.peer("peer0", train)
    world.run()
    assert steps == [None]
    assert trainer.opt.epoch == 1


def test_sparse_adam_gets_sparse_gradients(world: World) -> None:
    class Words(Trainer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            torch.manual_seed(1)
            self.model = nn.Embedding(10, 4, sparse=True)
            self.make = lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1)

        def backward(self) -> None:
            self.model(torch.tensor([self.index])).sum().backward()

    trainers = [Words(world, index, 3).begin() for index in range(4)]
    before = trainers[0].model.weight.detach().clone()
    world.run()
    assert_alike(trainers)
    changed = (trainers[0].model.weight != before).any(1)
    assert changed.tolist() == [True] * 4 + [False] * 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_batch_size": 0}, "target_batch_size: expected a finite number above 0, got 0"),
        ({"batch_size": -1}, "batch_size: expected a finite number above 0, got -1"),
        ({"clip": float("nan")}, "clip: expected a finite number above 0, got nan"),
        ({"alone": "sleep"}, "alone: expected 'train' or 'wait', got 'sleep'"),
        ({"patience": -1}, "patience: expected seconds >= 0, got -1"),
    ],
)
def test_options_out_of_range_are_refused(world: World, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Trainer(world, 0, 1, **options).join()


def test_a_closure_is_called_once_before_the_gradients_are_taken(world: World) -> None:
    model = network()
    before = [one.detach().clone() for one in model.parameters()]

    def work() -> None:
        run = world.join("peer0", "text", model)
        opt = run.optimizer(
            adamw(model.parameters()),
            target_batch_size=SAMPLES,
            batch_size=SAMPLES,
            patience=0,
        )

        def closure() -> float:
            loss = loss_of(model, batch_of(0, 0, SAMPLES))
            loss.backward()
            return float(loss)

        assert opt.step(closure) > 0
        assert opt.epoch == 1

    world.peer("peer0", work)
    world.run()
    assert not any(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))


def test_misuse_is_refused_with_one_line(world: World) -> None:
    model: Any = network()
    other = network()
    run = world.join("peer0", "text", model)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got Sequential"):
        run.optimizer(model, target_batch_size=1)
    with pytest.raises(TypeError, match="got LBFGS, which computes them several times: `DiLoCo` takes it"):
        run.optimizer(torch.optim.LBFGS(model.parameters()), target_batch_size=1)
    with pytest.raises(Refused, match="of the optimizer's parameters are not those of run 'text'"):
        run.optimizer(adamw(other.parameters()), target_batch_size=1)
    with pytest.raises(Refused, match=r"are not the optimizer's, as '0\.bias'.* join a run for each"):
        run.optimizer(adamw([model[0].weight]), target_batch_size=1)
    opt = run.optimizer(adamw(model.parameters()), target_batch_size=1)
    with pytest.raises(TypeError, match="one run takes one optimizer"):
        run.optimizer(opt, target_batch_size=1)
    with pytest.raises(Refused, match="run 'text' is stepped by an optimizer already"):
        run.optimizer(adamw(model.parameters()), target_batch_size=1)
    with pytest.raises(Refused, match="join again with all of them"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_it_is_the_wrapped_optimizer_to_others(world: World) -> None:
    trainer = Trainer(world, 0, 1)
    trainer.join()
    opt = trainer.opt
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups is opt.inner.param_groups
    assert opt.defaults == opt.inner.defaults
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=10)
    assert opt.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.param_groups is opt.inner.param_groups
    assert "SwarmOptimizer" in repr(opt)


def test_hooks_of_steps_are_called(world: World) -> None:
    trainer = Trainer(world, 0, 1, alone="wait")
    called: list[str] = []

    def train() -> None:
        trainer.join()
        trainer.opt.register_step_pre_hook(lambda *told: called.append("before"))
        trainer.opt.register_step_post_hook(lambda *told: called.append("after"))
        trainer.backward()
        trainer.opt.step()

    world.peer("peer0", train)
    world.run()
    assert called == ["before", "after"]


def test_only_peers_with_the_same_terms_meet(world: World) -> None:
    runs = []
    for index, target in enumerate((32, 64)):
        trainer = Trainer(world, index, 1, target_batch_size=target)
        trainer.join()
        runs.append(trainer.run)
    assert isinstance(runs[0].state, NoPeers)
    terms = dict(runs[0].terms)
    assert terms.pop("hyperparameters").startswith("amsgrad=False, betas=(0.9, 0.999)")
    assert terms.pop("parameter groups").startswith("1: ")
    assert terms == {
        "optimizer": "AdamW",
        "target batch size": "32",
        "clip": "none",
        "scheduler": "none",
        "buffers": "each peer's own",
        "extra state": "none",
    }


def cosine(epochs: int) -> Any:
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)


def grouped(undecayed: int) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        held = list(parameters)
        none = {"params": held[undecayed:], "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": held[:undecayed]}, none], lr=1e-2)

    return make


@pytest.mark.parametrize(
    ("term", "here", "there"),
    [
        ("scheduler", {"scheduler": cosine(100)}, {"scheduler": cosine(1000)}),
        ("parameter groups", {"make": grouped(1)}, {"make": grouped(2)}),
        ("extra state", {"extra": {"data": torch.nn.Linear(1, 1)}}, {}),
    ],
)
def test_what_would_part_them_is_a_term(
    world: World, term: str, here: dict[str, Any], there: dict[str, Any]
) -> None:
    terms = []
    for index, given in enumerate((here, there, here)):
        options = dict(given)
        trainer = Trainer(world, index, 1)
        trainer.make = options.pop("make", trainer.make)
        trainer.options |= options
        trainer.join()
        terms.append(dict(trainer.run.terms))
    assert terms[0] == terms[2]
    assert {name for name in terms[0] if terms[0][name] != terms[1][name]} == {term}


def reordered(parameters: Any) -> torch.optim.Optimizer:
    first, second, *others = parameters
    return torch.optim.AdamW([second, first, *others], lr=1e-2)


def rates(second: float) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        held = list(parameters)
        groups = [{"params": held[:1]}, {"params": held[1:], "lr": second}]
        return torch.optim.AdamW(groups, lr=1e-2)

    return make


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (rates(2e-4), rates(1e-4), "group 1: lr: here 0.0002, there 0.0001"),
        (adamw, reordered, "parameter groups: '0.weight' has another place there"),
    ],
)
def test_a_group_that_differs_is_told_by_its_key_and_an_order_by_its_first_name(
    world: World, here: Any, there: Any, said: str
) -> None:
    specs = []
    for index, make in enumerate((here, there)):
        trainer = Trainer(world, index, 1)
        trainer.make = make
        trainer.join()
        specs.append(
            RunSpec.create("text", trainer.run.core.binding.steps.layout.schema, terms=trainer.run.terms)
        )
    assert differences(specs[0], answer_of(specs[1], specs[0].marks, 1.0)) == said


def test_many_parameter_groups_fit_the_terms(world: World) -> None:
    terms = []
    for index, decay in enumerate((0.1, 0.2)):
        trainer = Trainer(world, index, 1)
        trainer.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(80)))
        held = list(trainer.model.parameters())
        groups = [{"params": [one], "weight_decay": decay if one is held[-1] else 0.0} for one in held]
        trainer.make = lambda parameters, groups=groups: torch.optim.AdamW(groups)
        trainer.join()
        terms.append(dict(trainer.run.terms))
    assert {name for name in terms[0] if terms[0][name] != terms[1][name]} == {"further groups"}


def test_what_newcomers_could_not_be_given_is_refused_at_once(world: World) -> None:
    sampler = SimpleNamespace(state_dict=lambda: {"seen": {1, 2}}, load_state_dict=lambda state: None)
    trainer = Trainer(world, 0, 1, extra={"sampler": sampler})
    with pytest.raises(ImageError, match="'extra sampler/seen' is a set: expected numbers"):
        trainer.join()


def test_a_scheduler_that_wants_a_metric_is_refused(world: World) -> None:
    trainer = Trainer(world, 0, 1, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(TypeError, match="wants a metric"):
        trainer.join()


def test_told_to_wait_its_step_returns_and_goes_on_adding_up(world: World) -> None:
    trainer = Trainer(world, 0, 1, alone="wait", target_batch_size=2 * SAMPLES)
    trainer.join()
    for calls in range(1, 6):
        trainer.backward()
        trainer.opt.step()
        assert trainer.opt.member.accumulated == calls * SAMPLES
    assert trainer.opt.epoch == 0
    assert trainer.opt.reason == "it waits: no other peer of this run is known"


def test_a_parameter_whose_mean_is_zero_is_skipped_even_by_weight_decay(world: World) -> None:
    class Zeroed(Trainer):
        def backward(self) -> None:
            super().backward()
            next(iter(self.model.parameters())).grad.zero_()

    trainers = [Zeroed(world, index, 3).begin() for index in range(2)]
    before = next(iter(trainers[0].model.parameters())).detach().clone()
    world.run()
    assert torch.equal(next(iter(trainers[0].model.parameters())), before)


def test_what_no_round_counted_is_named_at_the_end_and_the_statistics_are_the_groups(world: World) -> None:
    trainers = [Trainer(world, index, 3, buffers=True, target_batch_size=2 * SAMPLES) for index in range(2)]
    ends: dict[int, Any] = {}

    def work(trainer: Trainer) -> None:
        trainer.train()
        if trainer is trainers[0]:
            trainer.backward()
            trainer.opt.step()
        ends[trainer.index] = trainer.opt.finish()

    for trainer in trainers:
        trainer.model = nn.Sequential(nn.BatchNorm1d(8), *trainer.model)
        world.peer(trainer.name, lambda trainer=trainer: work(trainer))
    world.run()
    assert ends[0] == (True, "its state is the group's; 8 samples that no round counted")
    assert ends[1] == (True, "its state is the group's")
    first, second = (trainer.model.state_dict() for trainer in trainers)
    assert torch.equal(first["0.running_mean"], second["0.running_mean"])


def test_a_model_whose_statistics_stay_each_peers_own_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for name, buffers in (("own", False), ("averaged", True)):
        model = nn.BatchNorm1d(8)
        run = world.join("peer", name, model)
        run.optimizer(adamw(model.parameters()), target_batch_size=1, buffers=buffers)
    told = "run own: each peer keeps its own buffers (2, such as 'running_mean'): buffers=True averages them"
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [told]
