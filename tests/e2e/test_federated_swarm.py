"""Eight daemons learn digits of which each has two classes, while daemons are killed and a newcomer comes.

Which peers are drawn follows from their random identities, and the accuracy of a run from that: it varies by three
points without any fault. So each run is compared with the same draws in one process, where nothing fails. What other
draws cost on average, `tests/peer/simulation/test_swarm_faults.py` tells by many simulated runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from statistics import fmean

import pytest
import torch

from e2e.learners import LISTEN, daemons
from e2e.swarm import DaemonProcess, Swarm, eventually
from e2e.threads import begin, settle
from equipoise.averaging.outer import parse_outer
from equipoise.peer import connect
from equipoise.peer.client.tensors import copies_of
from equipoise.peer.demo.trainer import Digits, deal, split_digits
from equipoise.peer.training import Federated, History, Task
from fakes.softmax import SoftmaxLearner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PEERS, ROUNDS, KILL_EVERY, NEWCOMER_ROUND = 8, 20, 3, 9

LAST = 5
"""Rounds at the end over which accuracies are averaged: with half of the classes drawn, one round is chance."""

SPLIT = "classes:each=2"

SECONDS = 60.0
"""Far more than any condition takes."""


class Pace:
    """Says which rounds may be trained: a training that has begun waits for its round, so that a kill meets it."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._changed = threading.Condition()
        self.training: dict[int, list[int]] = {}

    def allow(self, number: int) -> None:
        with self._changed:
            self._allowed = number
            self._changed.notify_all()

    def wait(self, number: int, index: int) -> None:
        with self._changed:
            self.training.setdefault(number, []).append(index)
            assert self._changed.wait_for(lambda: self._allowed >= number, SECONDS)


class Script:
    """A training script in a thread.

    Attributes:
        share: Its own images.
        alone: The accuracy after as many trainings on its own images alone.
        fits: The rounds for which it trained.
        peer: Its PeerID.
        history: The records of all rounds.
        accuracies: By number of rounds made, of the agreed model on all test images.
        image: All that peers hold alike at the end.
    """

    def __init__(self, index: int, place: DaemonProcess, pace: Pace, data: tuple[Digits, Digits]) -> None:
        self.index, self.place, self._pace = index, place, pace
        training, self._test = data
        self.share = deal(training, index % PEERS, PEERS, SPLIT)
        self._learner, alone = (SoftmaxLearner(self.share, seed=index) for _ in range(2))
        for _ in range(ROUNDS):
            alone.fit()
        self.alone = alone.accuracy(self._test)
        self.fits: list[int] = []
        self.peer = ""
        self.history = History()
        self.accuracies: dict[int, float] = {}
        self.image = b""

    def run(self, name: str, outer: str) -> None:
        strategy = f"federated:fraction=0.5,available={PEERS},grace=5"
        with connect(self.place.home) as peer, peer.join(name, self._learner.model, strategy=strategy) as run:
            trained = Federated(run, self._fit, self._evaluate, outer, rounds=ROUNDS)
            self.history = trained.run()
            self.peer = run.peer
            self.image = bytes(trained.member.image().numpy())

    def _fit(self, task: Task) -> tuple[float, dict[str, float]]:
        self.fits.append(task.number)
        self._pace.wait(task.number, self.index)
        return float(self._learner.samples), {"loss": self._learner.fit()}

    def _evaluate(self, task: Task) -> tuple[float, dict[str, float]]:
        accuracy = self.accuracies[task.number] = self._learner.accuracy(self._test)
        return float(len(self._test.labels)), {"accuracy": accuracy}


class Company:
    """The scripts of one run, and what becomes of them."""

    def __init__(self, name: str, outer: str, pace: Pace) -> None:
        self._name, self._outer = name, outer
        self.pace = pace
        self.scripts: list[Script] = []
        self._ends: list[Future[None]] = []
        self._data = split_digits()

    def come(self, place: DaemonProcess) -> Script:
        script = Script(len(self.scripts), place, self.pace, self._data)
        self.scripts.append(script)
        self._ends.append(begin(script.run, self._name, self._outer))
        return script

    def reach(self, number: int, scripts: Sequence[Script]) -> None:
        """Wait until one of `scripts` has so many rounds, or a script has failed."""
        eventually(
            lambda: (
                any(one.done() for one in self._ends)
                or any(max(one.accuracies, default=0) >= number for one in scripts)
            ),
            f"round {number}",
            SECONDS,
        )

    def end(self) -> None:
        self.pace.allow(ROUNDS)
        settle(self._ends, SECONDS)

    def undisturbed(self) -> float:
        """The accuracy that the same trainings lead to in one process, where no peer is killed.

        The same draws: the peers that contributed to a round train from the model of the round before. What a peer that
        was killed has trained in vain, it trains here as well, since it goes on with its next batches.
        """
        _, test = self._data
        learners = {one.peer: SoftmaxLearner(one.share, seed=one.index) for one in self.scripts}
        agreed = copies_of(dict(learners[self.scripts[0].peer].model.named_parameters()))
        outer, shown, found = parse_outer(self._outer), learners[self.scripts[0].peer], []
        for record in self.scripts[0].history:
            moved = {}
            for one in self.scripts:
                if record.number in one.fits:
                    own = dict(learners[one.peer].model.named_parameters())
                    put(agreed, own)
                    learners[one.peer].fit()
                    moved[one.peer] = {name: agreed[name] - value.detach() for name, value in own.items()}
            total = sum(record.contributors.values())
            shares = {peer: weight / total for peer, weight in record.contributors.items()}
            mean = {
                name: torch.stack([share * moved[peer][name] for peer, share in shares.items()]).sum(0)
                for name in agreed
            }
            outer.step(agreed, mean)
            put(agreed, dict(shown.model.named_parameters()))
            found.append(shown.accuracy(test))
        assert len(found) == ROUNDS
        return fmean(found[-LAST:])

    @property
    def accuracy(self) -> float:
        """Mean accuracy of the models of the last rounds, on which all agree that hold them."""
        found: list[float] = []
        for number in range(ROUNDS - LAST + 1, ROUNDS + 1):
            told = {one.accuracies[number] for one in self.scripts if number in one.accuracies}
            assert len(told) == 1
            found += told
        return fmean(found)


def put(values: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            into[name].copy_(value)


def disturb(swarm: Swarm, company: Company) -> list[int]:
    """Kill a daemon in every third round, in the midst of its training; it misses two. Returns who was killed."""
    killed: list[int] = []
    first = company.scripts[0].place
    for number in range(KILL_EVERY, ROUNDS, KILL_EVERY):
        company.pace.allow(number - 1)
        trains = eventually(lambda at=number: company.pace.training.get(at), f"round {number}", SECONDS)
        victim = company.scripts[min(trains, key=killed.count)]
        killed.append(victim.index)
        victim.place.kill()
        company.pace.allow(number + 1)
        others = [one for one in company.scripts if one is not victim]
        company.reach(number + 1, others)
        victim.place.start()
        returned = [victim]
        if number == NEWCOMER_ROUND:
            returned.append(company.come(swarm.daemon(join=[first.address], args=LISTEN)))
        for one in returned:
            company.reach(number + 1, [one])
    return killed


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path_factory.mktemp("swarm"))
    yield swarm
    assert not swarm.close()


@pytest.fixture(scope="module")
def places(swarm: Swarm) -> list[DaemonProcess]:
    """Daemons that the tests share."""
    return daemons(swarm, PEERS)


@pytest.mark.parametrize("outer", ["average", "fedadam:eta=0.03", "fedyogi:eta=0.03"])
def test_killed_daemons_and_a_newcomer_cost_no_accuracy(
    swarm: Swarm, places: list[DaemonProcess], outer: str
) -> None:
    for place in places:
        if not place.running:  # A test that failed has left it dead.
            place.start()
    runs = []
    for faults in (False, True):
        name = f"{outer.partition(':')[0]}-{faults}"
        company = Company(name, outer, Pace(0 if faults else ROUNDS))
        try:
            for place in places:
                company.come(place)
            killed = disturb(swarm, company) if faults else []
        finally:
            company.end()
        runs.append(company)
    calm, rough = runs
    alone = fmean(one.alone for one in calm.scripts)
    same = [company.undisturbed() for company in runs]
    print(
        f"{outer}: {calm.accuracy:.3f}, in one process {same[0]:.3f}; with {killed} killed {rough.accuracy:.3f}, "
        f"in one process {same[1]:.3f}; alone {alone:.3f}"
    )
    assert len(killed) == 6
    assert len(rough.scripts) == PEERS + 1
    assert all(len(set(one.fits)) == len(one.fits) for one in calm.scripts)
    for company, whole in zip(runs, same, strict=True):
        assert len({one.image for one in company.scripts}) == 1
        assert company.accuracy >= alone + 0.4
        assert company.accuracy == pytest.approx(whole, abs=0.01)
