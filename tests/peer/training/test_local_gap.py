"""Promises of local steps: nearly what full synchronisation gives, for a small part of its bytes or on slow links."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.peer.demo.trainer import Digits, deal, split_digits
from equipoise.peer.training import DiLoCo, Gossip
from fakes.world import World

WORKERS, EVERY, STEPS, BATCH = 8, 50, 500, 16

VALUE_BYTES = 4

RATES = [4_000.0 * 8 ** (at / 7) for at in range(WORKERS)]
"""Bytes a second that each worker of gossip sends: an exchange of all takes some ten steps of a tenth of a second."""


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def batches(share: Digits, seed: int) -> Iterator[Digits]:
    chance = torch.Generator().manual_seed(seed)
    while True:
        yield share.pick(torch.randint(len(share.labels), (BATCH,), generator=chance))


def joined(sources: list[Iterator[Digits]]) -> Iterator[Digits]:
    """A batch of each source as one."""
    while True:
        parts = [next(source) for source in sources]
        yield Digits(torch.cat([one.pixels for one in parts]), torch.cat([one.labels for one in parts]))


def train(model: nn.Module, source: Iterator[Digits], stepped: Callable[[], None] = lambda: None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        batch = next(source)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.pixels), batch.labels).backward()
        optimizer.step()
        stepped()


def loss_on(model: nn.Module, test: Digits) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(test.pixels), test.labels))


def bounds(seed: int) -> tuple[list[Callable[[], Iterator[Digits]]], Digits, nn.Module, nn.Module]:
    """The data of each worker and of the test; a model of one worker alone, and one of all data in each step."""
    training, test = split_digits()
    sources: list[Callable[[], Iterator[Digits]]]
    sources = [partial(batches, deal(training, at, WORKERS), 100 * seed + at) for at in range(WORKERS)]
    alone, whole = network(seed), network(seed)
    train(alone, sources[0]())
    train(whole, joined([source() for source in sources]))
    return sources, test, alone, whole


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_closes_most_of_the_gap_for_a_small_part_of_the_bytes(seed: int) -> None:
    sources, test, alone, whole = bounds(seed)

    world = World("int8")
    models = [network(seed) for _ in range(WORKERS)]

    def work(at: int) -> None:
        run = world.join(f"peer{at}", "digits", models[at])
        with DiLoCo(run, every=EVERY) as trained:
            train(models[at], sources[at](), lambda: world.compute(0.1))
        assert trained.epoch == STEPS // EVERY

    world.each(WORKERS, work)

    worst, best = loss_on(alone, test), loss_on(whole, test)
    assert (worst - loss_on(models[0], test)) / (worst - best) >= 0.8
    values = sum(one.numel() for one in whole.parameters())
    every_step = STEPS * 2 * VALUE_BYTES * values * (WORKERS - 1) / WORKERS
    assert every_step / sum(one.bytes_sent for _, peer, one in world.outcomes if peer == "peer0") >= 150


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gossip_with_an_outer_step_closes_half_of_the_gap_and_ends_before_diloco_on_uneven_links(
    seed: int,
) -> None:
    sources, test, alone, whole = bounds(seed)
    worst, best = loss_on(alone, test), loss_on(whole, test)

    def trained(pairs: bool) -> tuple[float, float]:
        """The share of the gap that is closed, and when the last worker has made its steps."""
        world, models, ends = World("int8"), [network(seed) for _ in range(WORKERS)], []
        world.net.rates |= {f"peer{at}": rate for at, rate in enumerate(RATES)}

        def work(at: int) -> None:
            run = world.join(f"peer{at}", "digits", models[at], strategy="gossip" if pairs else "allreduce")
            waits: Any = {"wait_for": WORKERS - 1, "timeout": 120.0}
            outer = "nesterov:lr=0.7,momentum=0.3"
            every = EVERY // 2
            with Gossip(run, every, outer, **waits) if pairs else DiLoCo(run, every, **waits):
                train(models[at], sources[at](), lambda: world.compute(0.1))
                ends.append(world.now)

        world.each(WORKERS, work)
        losses = [loss_on(model, test) for model in models]
        return (worst - sum(losses) / WORKERS) / (worst - best), max(ends)

    (gossip, ends), (diloco, later) = trained(pairs=True), trained(pairs=False)
    print(f"gap closed: gossip {gossip:.2f}, DiLoCo {diloco:.2f}; last step at {ends:.1f} s, {later:.1f} s")
    assert gossip >= 0.5
    assert ends < later
