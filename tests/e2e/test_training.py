"""Training with real daemons, by scripts in threads: streams of fragments, and a newcomer with a large state."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn

from e2e.learners import LISTEN, daemons
from e2e.swarm import DaemonProcess, Swarm, eventually
from e2e.threads import begin, settle, together
from equipoise.peer import connect
from equipoise.peer.training import DiLoCo
from oracles.training import Nesterov, batch_of, difference, loss_of, network

SAMPLES, PEERS = 8, 2


def streamed(every: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """The workers' parameters when each half of the network is exchanged by itself, half a period apart."""
    halves = [{"0.weight", "0.bias", "4.weight", "4.bias", "2.bias"}, {"2.weight"}]
    due = {2 % every: halves[1], 0: halves[0]}
    agreed, outer = dict(copy.deepcopy(network()).named_parameters()), Nesterov()
    moments = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in agreed.items()}
    workers = [network() for _ in range(2)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=1e-2) for worker in workers]
    for step in range(1, steps + 1):
        for index, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(worker, batch_of(index, step - 1, SAMPLES)).backward()
            optimizer.step()
        with torch.no_grad():
            for name in due.get(step % every, ()):
                here = [dict(worker.named_parameters())[name] for worker in workers]
                delta = torch.stack([agreed[name] - one for one in here]).double().mean(0)
                moments[name].mul_(outer.momentum).add_(delta)
                agreed[name] -= (outer.lr * (delta + outer.momentum * moments[name])).float()
                for one in here:
                    one.copy_(agreed[name])
    return [dict(worker.state_dict()) for worker in workers]


def test_fragments_of_diloco_are_exchanged_in_turn(places: list[DaemonProcess]) -> None:
    every, steps = 5, 15

    def train(at: int) -> tuple[nn.Module, list[int]]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with connect(places[at].home) as peer, peer.join("streams", model, codec="fp32") as run:
            with DiLoCo(run, every=every, fragments=2, wait_for=1) as group:
                for number in range(steps):
                    optimizer.zero_grad()
                    loss_of(model, batch_of(at, number, SAMPLES)).backward()
                    optimizer.step()
            return model, [member.id.epoch for member in group.members]

    ends = together(train, range(2))
    assert [epochs for _, epochs in ends] == [[3, 3]] * 2
    for (model, _), expected in zip(ends, streamed(every, steps), strict=True):
        assert difference(dict(model.state_dict()), expected) <= 1e-5


MILLIONS_10 = 3150
"""Width of a network of ten million parameters."""


class Trainer:
    """A script with target batches that trains until it is told to stop; `counted` once its samples are in a mean."""

    def __init__(self, place: DaemonProcess, index: int) -> None:
        self.place, self.index = place, index
        self.states: dict[int, str] = {}
        self.counted = False

    def train(self, enough: threading.Event) -> None:
        model = network(MILLIONS_10)
        with connect(self.place.home) as peer, peer.join("large", model, codec="int8") as run:
            inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
            optimizer = run.optimizer(inner, target_batch_size=3 * SAMPLES, batch_size=SAMPLES)
            for number in range(10**6):
                optimizer.zero_grad()
                loss_of(model, batch_of(self.index, number, SAMPLES)).backward()
                optimizer.step()
                if optimizer.in_step and optimizer.last is not None:
                    self.states[optimizer.epoch] = optimizer.id.lineage
                    self.counted |= optimizer.last.contributors.get(peer.peer_id, 0.0) >= SAMPLES
                if enough.is_set():
                    return


@pytest.mark.slow
def test_a_newcomer_with_a_state_of_120_mb_contributes_while_the_others_step(swarm: Swarm) -> None:
    places, enough = daemons(swarm, 3), threading.Event()
    others = [Trainer(place, index) for index, place in enumerate(places)]
    ends = [begin(one.train, enough) for one in others]
    try:
        eventually(lambda: all(one.counted and max(one.states) >= 5 for one in others), "updates", 180)
        began = time.monotonic()
        late = Trainer(swarm.daemon(join=[places[1].address], args=LISTEN), 3)
        before = max(others[0].states)
        ends.append(begin(late.train, enough))
        eventually(lambda: late.counted, "the newcomer's contribution", 180)
        made = max(others[0].states) - before
        print(
            f"contributed {time.monotonic() - began:.1f} s after its daemon's start; the others made {made} updates"
        )
    finally:
        enough.set()
    settle(ends)
    everyone = [*others, late]
    common = set.intersection(*(set(one.states) for one in everyone))
    assert min(common) > before
    assert all(len({one.states[epoch] for one in everyone}) == 1 for epoch in common)
