"""State for newcomers among real daemons: from several at once, one killed meanwhile, while rounds go on."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from e2e.swarm import DaemonProcess, eventually
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.state import StateId
from equipoise.peer import Client, Outcome, Run, connect

pytestmark = pytest.mark.timeout(240)

PEERS = 4

VALUES = 10_000_000
"""Parameters of the model; with the two moments of AdamW its image has 12 bytes of each."""

STATE = StateId(41, "41" * 32)

STEP_VALUES = 100_000
"""Of the rounds that go on meanwhile."""


class Donor(threading.Thread):
    """A trainer that steps without pause until it is told to stop, or its daemon dies.

    Its contributions are bound to no state: after the first mean, a contribution to the old state would be late.

    Attributes:
        outcomes: What its rounds came to.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self.outcomes: list[Outcome] = []
        self._run = run
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            self._run.accumulate([torch.ones(STEP_VALUES)], weight=1)
            outcome = self._run.step(timeout=20.0)
            if outcome.reason.startswith("the daemon on "):
                return
            self.outcomes.append(outcome)

    def stop(self) -> None:
        self._ended.set()
        self.join(30.0)


def join(daemons: list[DaemonProcess], name: str) -> list[tuple[Client, Run]]:
    clients = [connect(daemon.home) for daemon in daemons]
    runs = [client.join(name, [torch.zeros(STEP_VALUES)], codec="fp32") for client in clients]
    for run in runs:
        eventually(lambda run=run: getattr(run.state, "peers", 0) == len(runs) - 1, "the other peers", 60.0)
    return list(zip(clients, runs, strict=True))


def test_status_tells_who_fetches_and_who_serves(places: list[DaemonProcess]) -> None:
    daemons = places[2:]  # That the other test kills none of.
    (donor, run), (newcomer, fetching) = join(daemons, "small")
    for one in (run, fetching):
        one.accumulate([torch.ones(STEP_VALUES)], weight=1)
    eventually(lambda: fetching.progress().swarm == 2, "that the other peer steps, too")
    pending = fetching.fetch(Wish(3, 1000))

    eventually(lambda: run.progress().wanted, "the wish")
    assert "1 peer wants the state of epoch 3" in daemons[0].cli("status").stdout
    assert "fetching a state" in daemons[1].cli("status").stdout
    assert "peer wants" in donor.status().runs[0].transfer
    run.offer(StateId(3, "3" * 64), b"image")

    fetched = pending.result()
    assert fetched.ok, fetched.reason
    assert pending.content == b"image"
    assert newcomer.status().runs[0].transfer == ""


@pytest.mark.slow
def test_an_image_of_120_mb_from_three_of_which_one_is_killed_while_rounds_go_on(
    places: list[DaemonProcess],
) -> None:
    image = np.random.default_rng(1).bytes(12 * VALUES)
    *donors, (newcomer, fetching) = join(places, "big")
    trainers = [Donor(run) for _, run in donors]
    for trainer in trainers:
        trainer.start()
    for _, run in donors:
        run.offer(STATE, image)
    eventually(lambda: all(trainer.outcomes for trainer in trainers), "a first round")

    pending = fetching.fetch(Wish(STATE.epoch, 2 * len(image)))
    eventually(lambda: pending.done() or "from 3 peers" in newcomer.status().runs[0].transfer, "three donors")
    places[1].kill()
    cut = not pending.done()
    rounds = [len(trainer.outcomes) for trainer in trainers]
    fetched = pending.result()
    survivors = [trainers[0], trainers[2]]
    eventually(
        lambda: all(
            any(outcome.ok for outcome in trainer.outcomes[before:])
            for trainer, before in zip(survivors, (rounds[0], rounds[2]), strict=True)
        ),
        "rounds of those that are left",
        60.0,
    )
    for trainer in trainers:
        trainer.stop()

    assert fetched.ok, fetched.reason
    assert fetched.state == STATE
    assert pending.content == image
    assert cut, "the download was over before the kill; a larger image would not be"
    assert len(fetched.sources) >= 2
    print(f"{len(image) / 1e6 / fetched.seconds:.0f} MB/s; {fetched.reason}; {fetched.sources}")
