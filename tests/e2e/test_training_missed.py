"""Means that a peer missed, among real daemons: it gets them from the others, and nobody takes a snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from e2e.swarm import DaemonProcess, eventually
from e2e.threads import together
from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.replication.answers import Wish
from equipoise.peer import Run, connect
from equipoise.peer.client.futures import Download
from equipoise.peer.training import DiLoCo, SwarmOptimizer
from equipoise.peer.training.member import Finished
from oracles.training import batch_of, loss_of, network

pytestmark = pytest.mark.timeout(240)

SAMPLES, PEERS = 8, 4


class Watched:
    """A trainer in this process, and what its run gave and took.

    Attributes:
        offers: Snapshots that it offered.
    """

    def __init__(self, run: Run, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.index, self.batches = run, index, 0
        self.model: Any = run.source
        self.offers: list[object] = []
        self._asked: list[Download] = []
        fetch = run.fetch

        def watched(wish: Wish, timeout: float) -> Download:
            going = fetch(wish, timeout)
            self._asked += [going] if wish.after is not None else []
            return going

        monkeypatch.setattr(run, "fetch", watched)
        monkeypatch.setattr(run, "offer", lambda *args: self.offers.append(args))

    @property
    def recovered(self) -> list[FetchOutcome]:
        """The means that it missed and got."""
        return [found for one in self._asked if one.done() and (found := one.result()).ok]

    def backward(self) -> None:
        loss_of(self.model, batch_of(self.index, self.batches, SAMPLES)).backward()
        self.batches += 1

    def parameters(self) -> list[float]:
        return torch.cat([one.detach().flatten() for one in self.model.parameters()]).tolist()


@contextlib.contextmanager
def watched(
    places: Sequence[DaemonProcess], name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Watched]]:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(connect(place.home)) for place in places]
        runs = [stack.enter_context(peer.join(name, network(), codec="int8")) for peer in peers]
        yield [Watched(run, index, monkeypatch) for index, run in enumerate(runs)]


def train(trainer: Watched, optimizer: SwarmOptimizer, epoch: int) -> None:
    """Step until the run has come to an epoch."""
    while optimizer.epoch < epoch:
        optimizer.zero_grad()
        trainer.backward()
        optimizer.step()


def train_to_the_end(trainer: Watched, optimizer: SwarmOptimizer, epoch: int) -> Finished:
    train(trainer, optimizer, epoch)
    return optimizer.finish()


def test_one_that_missed_rounds_gets_their_means_and_nobody_takes_a_snapshot(
    places: list[DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(places, "missed", monkeypatch) as trainers:
        optimizers = [
            trainer.run.optimizer(
                torch.optim.AdamW(trainer.model.parameters(), lr=1e-2),
                target_batch_size=(PEERS - 1) * SAMPLES,
                batch_size=SAMPLES,
                patience=60.0,
            )
            for trainer in trainers
        ]
        assert all(together(lambda one: one.run.wait_for(PEERS - 1), trainers))
        together(train, trainers, optimizers, [3] * PEERS)
        assert len({optimizer.id for optimizer in optimizers}) == 1
        # The last has other things to do for a while.
        together(train, trainers[:-1], optimizers[:-1], [6] * (PEERS - 1))
        assert optimizers[-1].epoch == 3
        ends = together(train_to_the_end, trainers, optimizers, [8] * PEERS)

        assert all(end.in_step for end in ends), ends
        assert len({optimizer.id for optimizer in optimizers}) == 1
        assert all(trainer.parameters() == trainers[0].parameters() for trainer in trainers)
        missed = trainers[-1].recovered
        assert [found.round.state.epoch for found in missed if found.round and found.round.state][:3] == [
            3,
            4,
            5,
        ]
        assert all(found.sources for found in missed)
        assert not any(trainer.offers for trainer in trainers)


def test_a_straggler_ends_with_the_last_exchange_that_it_missed(
    places: list[DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = 4
    groups: dict[int, DiLoCo] = {}

    def work(trainer: Watched) -> None:
        late = trainer.index == PEERS - 1
        inner = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
        with DiLoCo(trainer.run, every=every, patience=60.0) as group:
            groups[trainer.index] = group
            assert trainer.run.wait_for(PEERS - 1)
            while group.epoch < 2 - late:
                inner.zero_grad()
                trainer.backward()
                inner.step()
            if late:
                eventually(
                    lambda: sum(one.epoch == 2 for one in groups.values()) == PEERS - 1, "the others", 60
                )

    with watched(places, "late", monkeypatch) as trainers:
        together(work, trainers)

        ends = [group.finished for group in groups.values()]
        assert all(end is not None and end.in_step for end in ends), ends
        assert [group.epoch for group in groups.values()] == [2] * PEERS
        assert all(trainer.parameters() == trainers[0].parameters() for trainer in trainers)
        assert len(trainers[-1].recovered) == 1
        assert not any(trainer.offers for trainer in trainers)
