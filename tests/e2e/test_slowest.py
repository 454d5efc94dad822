"""Local steps of six real daemons, of which one's script is twenty times slower and one is killed."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def live(daemon: DaemonProcess, index: int, epochs: list[int], over: threading.Event) -> dict[str, Any]:
    """Train; returns the peer, its last state, all weights, the share of time that it waited, and for whom by outcomes.

    It waits in `step()`, beyond what the median step takes; on a busy machine also for peers that are as fast.
    """
    model, chance = torch.nn.Linear(40, 10), torch.Generator().manual_seed(index)
    for parameter in model.parameters():  # All threads draw from one generator: a seed makes none alike.
        torch.nn.init.constant_(parameter, 0.1)
    optimizer, weights = torch.optim.SGD(model.parameters(), lr=0.01), set[tuple[str, float]]()
    seconds, steps, waits = STEP_SECONDS * (SLOWER if index == SLOW else 1), list[float](), dict[Any, Any]()
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
                if (last := loop.last) is not None:
                    weights |= set(last.contributors.items())
                    waits |= {(last.round, phase): told for phase, told in last.waits.items()}
            took = time.monotonic() - began
            over.set()
    waited, shares = sum(steps) - len(steps) * statistics.median(steps), Counter[str]()
    for name, lasted in waits.values():
        shares[name] += lasted / took
    return {
        "peer": client.peer_id,
        "state": loop.member.id,
        "weights": weights,
        "waited": waited / took,
        "for": shares,
    }


def test_five_daemons_go_on_without_one_that_is_slower_and_one_that_is_killed(swarm: Swarm) -> None:
    daemons, epochs, over = swarm.daemons(6, args=LISTEN), [0] * 6, threading.Event()
    ends = [begin(live, daemon, index, epochs, over) for index, daemon in enumerate(daemons)]
    eventually(lambda: epochs[0] >= EXCHANGES // 2, "half of the exchanges", 400.0)
    daemons[DIES].kill()
    found: dict[int, dict[str, Any]] = {}
    for index, end in enumerate(ends):
        try:
            found[index] = end.result(400.0)
        except EquipoiseError:
            assert index == DIES
    slow, fast = found[SLOW]["peer"], [one for index, one in found.items() if index not in (DIES, SLOW)]
    weights = {weight for one in fast for name, weight in one["weights"] if name == slow and weight > 1e-3}
    apart = {slow} | ({found[DIES]["peer"]} if DIES in found else set())
    for one in fast:
        told = sum(one["for"][name] for name in apart)
        print(f"waited {one['waited']:.1%}, of that for the slow and the dead {told:.1%}")
    print(f"weights of the slow one {sorted(weights)}")
    assert len({one["state"] for one in fast}) == 1
    assert weights
    assert max(weights) <= EVERY / 2, "at a discount for at least three exchanges"
