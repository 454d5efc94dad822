"""Strangers with another state beside real trainers: those who have trained together keep theirs, and go on.

The strangers train on the cores of the others. So the pace of the others, which `-s` shows, falls as it would beside as
many honest newcomers: what is held here is that their steps remain updates of their own state. Four strangers train as
fast as they can. Twenty that do so overload two cores, so they pause between their steps.
"""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

from e2e.learners import daemons
from e2e.swarm import DaemonProcess, Swarm, eventually
from equipoise.averaging.state import StateId
from equipoise.peer import Run, connect
from equipoise.peer.training import SwarmOptimizer
from oracles.training import batch_of, loss_of, network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAINERS, SAMPLES = 3, 8
SECONDS, STEPS = 15.0, 15
"""Steps are counted for so long and so many, before the strangers come and while they are there: twenty that train on
two cores with them leave a step for every few seconds."""
THEIRS = StateId(2**40, "b" * 64)
"""What the strangers hold: of an epoch that is far beyond that of the others."""
FAR = 666.0
"""All of their parameters: their gradients are ten thousand times those of the others."""


class Trainer(threading.Thread):
    """Trains on one daemon until told to stop.

    Attributes:
        steps: Batches so far.
        updates: Steps that have changed the epoch.
        states: Epochs and lineages that it has held.
        largest: The largest of its parameters so far.
        reasons: What its optimizer has said.
        ended: Set to end it.
    """

    beside = TRAINERS - 1
    """Peers that it waits for."""

    def __init__(self, place: DaemonProcess, index: int, stranger: bool = False, pause: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.steps, self.updates, self.largest = 0, 0, 0.0
        self.states: dict[int, str] = {}
        self.reasons: set[str] = set()
        self.ended = threading.Event()
        self._place, self._index, self._stranger, self._pause = place, index, stranger, pause

    def run(self) -> None:
        model = network(seed=7 if self._stranger else 0)
        with (
            connect(self._place.home) as peer,
            peer.join("shared", model, codec="fp32", group_size=32) as run,
        ):
            optimizer = run.optimizer(
                torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
                target_batch_size=TRAINERS * SAMPLES,
                batch_size=SAMPLES,
            )
            if self._stranger:
                with torch.no_grad():
                    for one in model.parameters():
                        one.fill_(FAR)
                optimizer.load(optimizer.member._state.image(THEIRS))
                # Without it, it would take the state of the trainer that its daemon was told to join by.
                optimizer.member._follower.known.group = lambda *_: optimizer.id  # type: ignore[method-assign]
            else:
                run.wait_for(self.beside, timeout=60.0)
            for number in itertools.count():
                if self.ended.wait(self._pause):
                    return
                self._step(run, optimizer, number)

    def _step(self, run: Run, optimizer: SwarmOptimizer, number: int) -> None:
        optimizer.zero_grad()
        loss_of(run.core.binding.source, batch_of(self._index, number, SAMPLES)).backward()  # type: ignore[arg-type]
        before = optimizer.epoch
        optimizer.step()
        self.steps += 1
        self.updates += optimizer.epoch != before
        self.states[optimizer.epoch] = optimizer.id.lineage
        self.reasons.add(optimizer.reason)
        self.largest = max(
            self.largest, *(float(one.detach().abs().max()) for one in optimizer.parameters.values())
        )


@pytest.mark.parametrize(("count", "pause"), [(4, 0.0), (20, 1.0)])
def test_newcomers_with_another_state_do_not_replace_that_of_three_who_have_trained(
    swarm: Swarm, count: int, pause: float
) -> None:
    places = daemons(swarm, TRAINERS + count)
    ours = [Trainer(place, index) for index, place in enumerate(places[:TRAINERS])]
    for trainer in ours:
        trainer.start()
    eventually(lambda: all(trainer.updates >= 20 for trainer in ours), "updates of all three", 120.0)

    def rate() -> tuple[float, float]:
        """Updates a second, and the share of steps that are updates."""
        steps, updates, began = ours[0].steps, ours[0].updates, time.monotonic()
        threading.Event().wait(SECONDS)
        eventually(lambda: ours[0].steps >= steps + STEPS, "steps to count", 240.0)
        done = ours[0].updates - updates
        return done / (time.monotonic() - began), done / (ours[0].steps - steps)

    before = rate()
    others = enumerate(places[TRAINERS:], TRAINERS)
    strangers = [Trainer(place, index, True, pause) for index, place in others]
    for stranger in strangers:
        stranger.start()
    eventually(
        lambda: any("keeps its own state" in reason for trainer in ours for reason in trainer.reasons),
        "that the three have met the strangers",
        120.0,
    )
    during = rate()
    for trainer in (*strangers, *ours):
        trainer.ended.set()
    for trainer in (*strangers, *ours):
        trainer.join(90.0)
    print(
        f"{count} strangers: {before[0]:.1f} updates a second before and {during[0]:.1f} during; "
        f"of the steps {before[1]:.0%} and {during[1]:.0%} were updates"
    )
    for trainer in ours:
        assert max(trainer.states) < THEIRS.epoch, "it has kept its own state"
        assert trainer.largest < FAR / 100, "the strangers' gradients count in none of its means"
    told = [trainer.states for trainer in ours]
    common = set.intersection(*(set(states) for states in told))
    assert all(len({states[epoch] for states in told}) == 1 for epoch in common)
    assert during[1] >= 0.8
