"""DiLoCo's promise: nearly what full synchronisation gives, for a small part of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from equipoise.peer.demo.trainer import Digits, deal, split_digits
from equipoise.peer.training import DiLoCo
from fakes.world import World

WORKERS, EVERY, STEPS, BATCH = 8, 50, 500, 16

VALUE_BYTES = 4


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_closes_most_of_the_gap_for_a_small_part_of_the_bytes(seed: int) -> None:
    training, test = split_digits()
    sources = [lambda at=at: batches(deal(training, at, WORKERS), 100 * seed + at) for at in range(WORKERS)]

    alone, whole = network(seed), network(seed)
    train(alone, sources[0]())
    train(whole, joined([source() for source in sources]))

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
