"""Contributions weigh the tokens or samples that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from equipoise.peer.errors import Refused
from equipoise.peer.training import LocalSGD
from equipoise.peer.training.counting import Seen
from fakes.world import World
from oracles.training import Batch, batch_of, difference, joined, loss_of, network

TOKENS = {0: [8, 8, 8, 3], 1: [512, 512, 512, 100]}
"""Tokens in each row of the two peers; the last ones are short."""

Rows = list[Batch]


def rows(peer: int) -> Rows:
    return [batch_of(peer, at, tokens) for at, tokens in enumerate(TOKENS[peer])]


def padded(batch: Batch) -> torch.Tensor:
    """The inputs and as many rows of zeros: padding."""
    return torch.cat([batch.inputs, torch.zeros_like(batch.inputs)])


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def by_optimizer(told: str) -> Callable[[Any, torch.nn.Module, Rows], None]:
    def train(run: Any, model: torch.nn.Module, rows: Rows) -> None:
        optimizer = run.optimizer(sgd(model), target_batch_size=1, wait_for=1)
        for row in rows:
            optimizer.zero_grad()
            loss_of(model, row).backward()
            if told == "count":
                optimizer.count(torch.tensor(len(row.targets)))
            optimizer.step(**({"samples": len(row.targets)} if told == "samples" else {}))

    return train


def by_local_steps(run: Any, model: torch.nn.Module, rows: Rows) -> None:
    optimizer = sgd(model)
    with LocalSGD(run, every=1, wait_for=1) as group:
        for row in rows:
            optimizer.zero_grad()
            loss_of(model, row).backward()
            group.count(len(row.targets))
            optimizer.step()


def by_batches(run: Any, model: torch.nn.Module, rows: Rows) -> None:
    optimizer = sgd(model)
    with LocalSGD(run, every=1, wait_for=1, count=lambda batch: batch.any(1).sum()):
        for row in rows:
            optimizer.zero_grad()
            found = model(padded(row))[: len(row.targets)]
            torch.nn.functional.mse_loss(found, row.targets).backward()
            with torch.no_grad():
                model.eval()(torch.ones(1000, 8))  # What is evaluated does not count.
                model.train()
            optimizer.step()


@pytest.mark.parametrize(
    "train", [by_optimizer("samples"), by_optimizer("count"), by_local_steps, by_batches]
)
def test_two_peers_equal_one_process_over_all_their_tokens(
    train: Callable[[Any, torch.nn.Module, Rows], None],
) -> None:
    world, models = World(weights="any"), [network(), network()]

    def work(peer: int) -> None:
        with world.join(f"peer{peer}", "text", models[peer]) as run:
            train(run, models[peer], rows(peer))

    world.each(2, work)
    alone = network()
    optimizer = sgd(alone)
    for pair in zip(rows(0), rows(1), strict=True):
        optimizer.zero_grad()
        loss_of(alone, joined(pair)).backward()
        optimizer.step()
    for model in models:
        assert difference(dict(model.named_parameters()), dict(alone.named_parameters())) < 1e-5
    weights = [one.contributors for _, _, one in world.outcomes if sum(one.contributors.values()) > 1]
    assert weights[0] == {"peer0": 8, "peer1": 512}
    assert weights[-1] == {"peer0": 3, "peer1": 100}


def test_without_a_count_steps_count_also_those_after_a_contribution_that_was_merged() -> None:
    seen = Seen()
    seen.steps = 5
    seen.give()
    seen.steps += 2
    assert seen.weight == 7
    seen.settle(kept=True)
    assert seen.weight == 2
    seen.count(30)
    assert seen.weight == 30
    seen.settle(kept=False)
    assert (seen.steps, seen.weight) == (0, 0)


@pytest.mark.parametrize("number", [-1, float("nan"), True, "8"])
def test_what_is_no_number_of_samples_is_refused(number: Any) -> None:
    world, model = World(), network()

    def work(peer: int) -> None:
        group = LocalSGD(world.join("peer0", "text", model), every=1)
        with pytest.raises(ValueError, match="expected a weight that is a finite number >= 0"):
            group.count(number)

    world.each(1, work)


def test_batches_of_what_is_no_module_are_refused() -> None:
    world = World()
    run = world.join("peer0", "text", dict(network().named_parameters()))
    with pytest.raises(Refused, match=r"joined with a module.* or call `count\(number\)` before each step"):
        LocalSGD(run, every=1, count=len)
