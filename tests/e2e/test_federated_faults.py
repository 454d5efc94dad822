"""Federated rounds whose coordinator, or a drawn peer, is killed or stopped while the others wait.

Each test holds trainings back until the fault meets them. Times are printed. Where nobody noticed a fault, the round
would last for the grace, which is far longer than the bounds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from e2e.learners import shared_daemons
from e2e.swarm import DaemonProcess, eventually
from e2e.threads import begin, settle
from equipoise.averaging.matchmaking.topology import ranked
from equipoise.averaging.outcome import Gathering
from equipoise.averaging.state import StateId
from equipoise.peer import Run, connect
from equipoise.peer.status import RunStatus
from equipoise.peer.training import Federated, Record, Task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PEERS = 7

ROUNDS = 2

LONG_GRACE = 120.0
"""Seconds for which a round would wait for a peer that nobody notices to be dead."""

BOUND = 30.0
"""Seconds in which a round must come about after a kill, where others keep the machine busy; alone, it takes 2 s."""

SECONDS = 60.0
"""Far more than any condition takes."""


class Gone(Exception):
    """The script has died with its daemon."""


class Script:
    """A training script in a thread.

    Attributes:
        holds: The rounds whose training waits until it may end.
        fits: The state from which each training began, and when.
        records: What `step` returned.
        ends: When each round was over here, by its number.
        image: All that peers hold alike at the end.
    """

    def __init__(self, place: DaemonProcess, index: int) -> None:
        self.place, self.index = place, index
        self.holds: dict[int, threading.Event] = {}
        self.fits: list[tuple[StateId, float]] = []
        self.records: list[Record] = []
        self.ends: dict[int, float] = {}
        self.image = b""
        self._model = {"w": torch.zeros(300)}
        self._dead = False
        self._run: Run
        self._trained: Federated

    def live(self, name: str, strategy: str) -> bool:
        """Make all rounds; returns False if it was killed."""
        try:
            self._train(name, strategy)
        except Gone:
            return False
        return True

    def _train(self, name: str, strategy: str) -> None:
        with (
            connect(self.place.home) as peer,
            peer.join(name, self._model, strategy=strategy, codec="fp32") as run,
        ):
            self._run = run
            self._trained = Federated(run, self._fit, outer="fedadam", rounds=ROUNDS)
            while not self._trained.ended:
                self.records.append(self._trained.step())
                if self._dead:
                    raise Gone
                self.ends[self._trained.epoch] = time.monotonic()
            self._trained.finish()
            self.image = bytes(self._trained.member.image().numpy())

    @property
    def peer(self) -> str:
        """Its PeerID."""
        return self._run.peer

    @property
    def contributed(self) -> set[str]:
        """The peers whose contributions are in, as far as this one is told."""
        state = self._run.state
        return set(state.contributed) if isinstance(state, Gathering) else set()

    @property
    def trained(self) -> float | None:
        """When its last training began; None before the first."""
        return self.fits[-1][1] if self.fits else None

    @property
    def status(self) -> RunStatus:
        """What its daemon says of the run."""
        with connect(self.place.home) as peer:
            return next(row for row in peer.status().runs if row.name == self._run.name)

    def kill(self) -> None:
        """Kill its daemon, and end its training."""
        self._dead = True
        self.place.kill()
        for hold in self.holds.values():
            hold.set()

    def _fit(self, task: Task) -> tuple[float, dict[str, float]]:
        self.fits.append((self._trained.member.id, time.monotonic()))
        if task.number in self.holds:
            assert self.holds[task.number].wait(SECONDS)
        if self._dead:
            raise Gone
        self._model["w"] += self.index + task.number
        return 1.0 + self.index, {}


@contextmanager
def company(places: Sequence[DaemonProcess], name: str, strategy: str) -> Iterator[list[Script]]:
    """A script on each daemon, whose first training is held; at the end all that live have ended alike."""
    scripts = [Script(place, index) for index, place in enumerate(places)]
    for one in scripts:
        one.holds[1] = threading.Event()
    spec = f"federated:available={len(places)},{strategy}"
    ends = [begin(one.live, name, spec) for one in scripts]
    try:
        yield scripts
    finally:
        for one in scripts:
            one.holds[1].set()
    settle(ends, SECONDS)
    alive = [one for one, end in zip(scripts, ends, strict=True) if end.result()]
    assert len({one.image for one in alive}) == 1
    for one in scripts:
        states = [state for state, _ in one.fits]
        assert len(set(states)) == len(states), "nobody trains twice from one state"


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DaemonProcess]]:
    with shared_daemons(tmp_path_factory, PEERS) as places:
        yield places


@pytest.fixture
def places(daemons: list[DaemonProcess]) -> list[DaemonProcess]:
    """All daemons; those that a test has killed run again."""
    for place in daemons:
        if not place.running:
            place.start()
    return daemons


def coordinator(scripts: Sequence[Script]) -> Script:
    """The script of the peer that coordinates the next round of a run that fits in one group."""
    named = {one.peer: one for one in scripts}
    return named[ranked(str(scripts[0].status.round), tuple(sorted(named)))[0]]


def told(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.2f} s")


@pytest.mark.parametrize("is_in", [False, True], ids=["trains", "is in"])
def test_the_coordinator_is_killed_while_the_others_wait(places: list[DaemonProcess], is_in: bool) -> None:
    with company(places, f"coordinator-{is_in}", f"quorum=3,grace={LONG_GRACE}") as scripts:
        eventually(lambda: all(one.trained for one in scripts), "all to train", SECONDS)
        victim = coordinator(scripts)
        others = [one for one in scripts if one is not victim]
        waits = others[1:] if is_in else others
        for one in [*waits, victim] if is_in else waits:
            one.holds[1].set()
        left = {one.peer for one in waits}
        before = left | {victim.peer} if is_in else left
        eventually(lambda: all(one.contributed == before for one in waits), "all to wait", SECONDS)
        victim.kill()
        killed = time.monotonic()
        if is_in:
            eventually(lambda: all(one.contributed == left for one in waits), "another coordinator", SECONDS)
            told("the coordinator killed: all are in with another after", time.monotonic() - killed)
            assert time.monotonic() - killed < BOUND
            killed = time.monotonic()
            others[0].holds[1].set()
        eventually(lambda: all(1 in one.ends for one in others), "the round", LONG_GRACE)
        took = max(one.ends[1] for one in others) - killed
    told(f"{'the last is in' if is_in else 'the coordinator killed'}: round over after", took)
    assert took < BOUND
    assert all(set(one.records[0].contributors) == {each.peer for each in others} for one in others)


def test_a_drawn_peer_is_killed_during_its_training_and_replaced(places: list[DaemonProcess]) -> None:
    strategy = f"fraction=0.5,quorum=3,grace={LONG_GRACE}"
    with company(places, "drawn", strategy) as scripts:
        eventually(lambda: sum(one.trained is not None for one in scripts) == 3, "three to train", SECONDS)
        drawn = [one for one in scripts if one.trained]
        victim = drawn[-1]
        others = [one for one in scripts if one is not victim]
        for one in drawn[:-1]:
            one.holds[1].set()
        waiting = {one.peer for one in drawn[:-1]}
        eventually(lambda: any(one.contributed == waiting for one in others), "two to wait", SECONDS)
        victim.kill()
        killed = time.monotonic()
        stands = next(
            iter(eventually(lambda: [one for one in others if one.trained and one not in drawn], "a fourth"))
        )
        assert stands.trained is not None
        told("a drawn peer killed: another trains after", stands.trained - killed)
        stands.holds[1].set()
        trained = time.monotonic()
        eventually(lambda: all(1 in one.ends for one in others), "the round", LONG_GRACE)
        took = max(one.ends[1] for one in others) - trained
        for one in others:
            one.holds[1].set()
    told("the round is over after its training by", took)
    assert stands.trained - killed < BOUND
    assert took < BOUND
    assert all(set(one.records[0].contributors) == waiting | {stands.peer} for one in others)


def test_a_drawn_peer_is_killed_and_nobody_is_left_for_it(places: list[DaemonProcess]) -> None:
    with company(places[:4], "last", f"quorum=3,grace={LONG_GRACE}") as scripts:
        eventually(lambda: all(one.trained for one in scripts), "all to train", SECONDS)
        victim = next(one for one in scripts if one is not coordinator(scripts))
        others = [one for one in scripts if one is not victim]
        for one in others:
            one.holds[1].set()
        waiting = {one.peer for one in others}
        eventually(lambda: all(one.contributed == waiting for one in others), "three to wait", SECONDS)
        victim.kill()
        killed = time.monotonic()
        eventually(lambda: all(1 in one.ends for one in others), "the round", LONG_GRACE)
        took = max(one.ends[1] for one in others) - killed
    told("the last drawn peer killed: round over after", took)
    assert took < BOUND
    assert all(set(one.records[0].contributors) == waiting for one in others)


def test_a_peer_that_is_stopped_during_its_training_costs_the_grace(places: list[DaemonProcess]) -> None:
    grace = 4.0
    with company(places[:5], "stopped", f"quorum=3,grace={grace}") as scripts:
        eventually(lambda: all(one.trained for one in scripts), "all to train", SECONDS)
        victim, *others = scripts
        for one in scripts:
            one.holds[2] = threading.Event()
        victim.place.pause()
        try:
            for one in others:
                one.holds[1].set()
            released = time.monotonic()
            eventually(lambda: all(1 in one.ends for one in others), "the round", SECONDS)
        finally:
            victim.place.resume()
        took = max(one.ends[1] for one in others) - released
        told(f"a peer stopped, grace {grace:g} s: round over after", took)
        victim.holds[1].set()
        eventually(lambda: 1 in victim.ends, "the stopped peer to catch up", SECONDS)
        for one in scripts:
            one.holds[2].set()
    assert took < grace + BOUND
    for one in others:
        assert set(one.records[0].contributors) == {each.peer for each in others}
    assert set(victim.records[-1].contributors) == {one.peer for one in scripts}
    assert victim.records[0].late > 0
