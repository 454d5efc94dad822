"""Eight real daemons that gossip: values come together while two are killed and two join."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch

from e2e.learners import LISTEN, daemons
from e2e.swarm import DaemonProcess, Swarm
from equipoise.peer import Outcome, connect

pytestmark = pytest.mark.slow

PEERS, VALUES = 8, 100_000
SECONDS, TIMEOUT = 20.0, 5.0


class Exchanger(threading.Thread):
    """Exchanges its tensor through one daemon until it is told to stop.

    Attributes:
        tensor: f32 [VALUES].
        outcomes: Of its exchanges.
        longest: Seconds of its longest call.
        ended: Set to end it.
        started: Set when it knows enough others.
    """

    def __init__(self, place: DaemonProcess, run: str, seed: int, company: int) -> None:
        super().__init__(daemon=True)
        self.tensor = torch.randn(VALUES, generator=torch.Generator().manual_seed(seed))
        self.outcomes: list[Outcome] = []
        self.longest = 0.0
        self.ended, self.started = threading.Event(), threading.Event()
        self._place, self._run, self._company = place, run, company

    def run(self) -> None:
        with (
            connect(self._place.home) as peer,
            peer.join(self._run, [self.tensor], strategy="gossip", codec="fp32") as run,
        ):
            run.wait_for(self._company)
            self.started.set()
            while not self.ended.is_set():
                began = time.monotonic()
                self.outcomes.append(run.average(timeout=TIMEOUT))
                self.longest = max(self.longest, time.monotonic() - began)

    def finish(self) -> None:
        self.ended.set()
        self.join(2 * TIMEOUT + 10.0)
        assert not self.is_alive()


def begin(places: list[DaemonProcess], run: str) -> list[Exchanger]:
    found = [Exchanger(place, run, at, PEERS - 1) for at, place in enumerate(places)]
    for one in found:
        one.start()
    assert all(one.started.wait(60.0) for one in found)
    return found


def spread_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack(tensors).std(0).mean())


def check(exchangers: list[Exchanger]) -> int:
    """Check the promises of every exchange, while two peers were killed; returns how many exchanges were ok."""
    outcomes = [outcome for each in exchangers for outcome in each.outcomes]
    ok = [outcome for outcome in outcomes if outcome.ok]
    assert all(len(one.contributors) == 2 for one in ok)
    applied = Counter(one.digest for one in ok)
    alone = {digest for digest, count in applied.items() if count != 2}
    assert max(applied.values()) == 2
    assert len(alone) <= 2, "of each peer that was killed, at most the exchange that it was in"
    assert max(each.longest for each in exchangers) < TIMEOUT + 2.0
    return len(applied)


def test_values_come_together_while_two_are_killed_and_two_join(swarm: Swarm) -> None:
    places = daemons(swarm, PEERS)
    first = [torch.randn(VALUES, generator=torch.Generator().manual_seed(at)) for at in range(PEERS)]
    exchangers = begin(places, "kills")
    threading.Event().wait(SECONDS / 4)
    for place in places[:2]:
        place.kill()
    for one in exchangers[:2]:
        one.ended.set()
    newcomers = [
        Exchanger(swarm.daemon(join=[places[2].address], args=LISTEN), "kills", PEERS + at, 2)
        for at in range(2)
    ]
    for one in newcomers:
        one.start()
    assert all(newcomer.started.wait(60.0) for newcomer in newcomers)
    threading.Event().wait(SECONDS)
    living = [*exchangers[2:], *newcomers]
    for one in (*living, *exchangers[:2]):
        one.finish()
    count = check([*exchangers, *newcomers])
    before, after = spread_of(first), spread_of([peer.tensor for peer in living])
    print(
        f"{count} exchanges with two killed and two that joined, the spread fell from {before:.3g} to {after:.3g}"
    )
    assert after <= before / 50
    assert all(any(outcome.ok for outcome in each.outcomes) for each in newcomers)
