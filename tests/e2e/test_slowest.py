"""Local steps of six real daemons, of which one's script is twenty times slower and one is killed."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import pytest
import torch

from e2e.learners import LISTEN
from e2e.swarm import DaemonProcess, Swarm, eventually
from e2e.threads import begin
from equipoise.peer import EquipoiseError, connect
from equipoise.peer.training import DiLoCo

STEP_SECONDS, SLOWER, EVERY, EXCHANGES = 0.25, 20, 30, 30
SLOW, DIES = 5, 4

COMPUTING = threading.Event()
"""Never set: a script that waits for it computes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def live(daemon: DaemonProcess, index: int, epochs: list[int], over: threading.Event) -> tuple[Any, ...]:
    """Train; returns the last state, the share of time that this peer waited, its PeerID, and all weights.

    It waits in `step()`, beyond what the median step takes.
    """
    model, chance = torch.nn.Linear(40, 10), torch.Generator().manual_seed(index)
    for parameter in model.parameters():  # All threads draw from one generator: a seed makes none alike.
        torch.nn.init.constant_(parameter, 0.1)
    optimizer, weights = torch.optim.SGD(model.parameters(), lr=0.01), set[tuple[str, float]]()
    seconds, steps = STEP_SECONDS * (SLOWER if index == SLOW else 1), list[float]()
    with connect(str(daemon.home)) as client:
        run = client.join("slowest", model, strategy="allreduce:quorum=3,grace=auto,late=next")
        with DiLoCo(run, every=EVERY, wait_for=0 if index == SLOW else 4) as loop:
            began = time.monotonic()
            while loop.epoch < EXCHANGES and not over.is_set():
                COMPUTING.wait(seconds)
                optimizer.zero_grad()
                model(torch.randn(8, 40, generator=chance)).square().mean().backward()
                before = time.monotonic()
                optimizer.step()
                steps.append(time.monotonic() - before)
                epochs[index] = loop.epoch
                weights |= set((loop.last.contributors if loop.last else {}).items())
            waited = (sum(steps) - len(steps) * statistics.median(steps)) / (time.monotonic() - began)
            over.set()
    return loop.member.id, waited, client.peer_id, weights


def test_five_daemons_go_on_without_one_that_is_slower_and_one_that_is_killed(swarm: Swarm) -> None:
    daemons, epochs, over = swarm.daemons(6, args=LISTEN), [0] * 6, threading.Event()
    ends = [begin(live, daemon, index, epochs, over) for index, daemon in enumerate(daemons)]
    eventually(lambda: epochs[0] >= EXCHANGES // 2, "half of the exchanges", 300.0)
    daemons[DIES].kill()
    found = []
    for index, end in enumerate(ends):
        try:
            found.append((index, *end.result(300.0)))
        except EquipoiseError:
            assert index == DIES
    peer = next(name for index, _, _, name, _ in found if index == SLOW)
    counted = {
        weight for _, _, _, _, weights in found for name, weight in weights if name == peer and weight > 1e-3
    }
    print(
        f"waited {[(index, round(waited, 3)) for index, _, waited, _, _ in found]}, weights of the slow one {counted}"
    )
    assert len({state for index, state, *_ in found if index not in (DIES, SLOW)}) == 1
    assert counted
    assert max(counted) <= EVERY / 2, "at a discount for at least three exchanges"
