"""Training with real daemons, by trainers in threads or in processes of their own: what issue 4 promises of it."""

from __future__ import annotations

import contextlib
import copy
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from e2e.learner import ADAMW, Report, Task, learn, learn_locally
from e2e.learners import LISTEN, Learner, Reporting, daemons, shared, start
from e2e.swarm import DaemonProcess, Swarm, eventually
from e2e.threads import begin, settle, together
from equipoise.peer import connect
from equipoise.peer.training import DiLoCo
from oracles.training import Nesterov, batch_of, difference, loss_of, network, train_diloco, train_whole

pytestmark = pytest.mark.timeout(240)

SAMPLES, PEERS = 8, 4


class Enough(Exception):
    """The test has seen what it waited for."""


class Trainer(Reporting):
    """A training script in a thread of this process.

    Attributes:
        enough: Ends the script after its next update, once set.
    """

    def __init__(self, place: DaemonProcess, task: Task) -> None:
        self.place, self.task = place, task
        self._reports: list[Report] = []
        self.enough = threading.Event()

    @property
    def reports(self) -> list[Report]:
        """See `Reporting`."""
        return self._reports

    def train(self) -> None:
        """Train all runs to their ends."""
        learns = learn_locally if self.task.every else learn
        with connect(self.place.home) as peer, contextlib.suppress(Enough):
            for codec, updates in self.task.runs.items():
                learns(peer, self.task, codec, updates, self._say)

    def _say(self, report: Report) -> None:
        self._reports.append(report)
        if self.enough.is_set():
            raise Enough


def trained(places: Sequence[DaemonProcess], **task: Any) -> list[Trainer]:
    """A trainer on each daemon, alike but for its index, after the end of all."""
    trainers = [
        Trainer(place, Task(index=index, peers=len(places), **task)) for index, place in enumerate(places)
    ]
    together(Trainer.train, trainers)
    return trainers


def replayed(trainers: Sequence[Trainer], run: str) -> dict[str, torch.Tensor]:
    """The parameters of one process that makes the same updates, each from all its samples at once."""
    epochs: dict[int, list[tuple[int, int]]] = {}
    for trainer in trainers:
        for update in trainer.updates:
            if update.run == run and update.batches:
                epochs.setdefault(update.epoch, []).extend((trainer.task.index, n) for n in update.batches)
    assert sorted(epochs) == list(range(1, len(epochs) + 1))
    updates = [[batch_of(*which, SAMPLES) for which in epochs[epoch]] for epoch in sorted(epochs)]
    model = network()
    train_whole(model, ADAMW, updates)
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("updates", "fewer"), [(10, 3), pytest.param(50, 10, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_four_peers_train_as_one_process_with_all_their_samples(
    places: list[DaemonProcess], tmp_path: Path, updates: int, fewer: int
) -> None:
    runs = {"fp32": updates, "fp16": fewer, "bf16": fewer, "int8": fewer}
    trainers = trained(places, runs=runs, samples=SAMPLES, target=float(SAMPLES * PEERS), save=str(tmp_path))
    for which, (codec, made) in enumerate(runs.items()):
        ends = [trainer.ended[which] for trainer in trainers]
        assert {end.epoch for end in ends} == {made}
        assert len({end.lineage for end in ends}) == 1, codec
        assert len({end.digest for end in ends}) == 1, codec
        found = load_file(tmp_path / f"{codec}-0.safetensors")
        off = difference(found, replayed(trainers, f"learn-{codec}"))
        print(f"{codec}: off by {off:.2g} after {made} updates")
        if codec == "fp32":
            assert off <= 1e-5


def test_diloco_is_what_its_paper_says(places: list[DaemonProcess], tmp_path: Path) -> None:
    workers, every, steps = 2, 5, 20
    trainers = trained(
        places[:workers], runs={"fp32": steps}, every=every, samples=SAMPLES, save=str(tmp_path)
    )
    ends = [end for trainer in trainers for end in trainer.ended]
    assert len(ends) == workers
    assert {end.epoch for end in ends} == {steps // every}
    assert len({end.lineage for end in ends}) == len({end.digest for end in ends}) == 1
    model = network()
    batches = [[batch_of(worker, number, SAMPLES) for number in range(steps)] for worker in range(workers)]
    train_diloco(model, ADAMW, batches, every, Nesterov())
    assert difference(load_file(tmp_path / "fp32-0.safetensors"), dict(model.state_dict())) <= 1e-5


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


def test_a_peer_trains_alone_until_others_come_and_they_take_over_its_state(
    places: list[DaemonProcess],
) -> None:
    task = Task(index=0, runs={"fp32": 10**9}, samples=SAMPLES, target=3.0 * SAMPLES, patience=0.5)
    everyone = [
        Trainer(place, msgspec.structs.replace(task, index=index)) for index, place in enumerate(places[:3])
    ]
    veteran, *newcomers = everyone
    try:
        ends = [begin(veteran.train)]
        eventually(lambda: len(veteran.updates) >= 5, "updates of one alone", 60)
        assert not any(update.contributors for update in veteran.updates)
        ends += [begin(newcomer.train) for newcomer in newcomers]
        eventually(lambda: all(of_all_three(one) >= 5 for one in everyone), "updates of all three", 60)
    finally:
        for one in everyone:
            one.enough.set()
    settle(ends)
    alone = next(update for update in veteran.updates if update.contributors).before
    assert alone >= 5
    assert all(update.epoch == update.before + 1 for update in veteran.updates), (
        "nothing of its training was lost"
    )
    assert min(shared(everyone)) > alone
    assert all(len(lineages) == 1 for lineages in shared(everyone).values())


def of_all_three(trainer: Trainer) -> int:
    """How many updates it has made from what all three gave."""
    return sum(update.contributors == 3 for update in trainer.updates)


MILLIONS_10 = 3150
"""Width of a network of ten million parameters."""

NEWCOMER_SECONDS = 120.0
"""The promise is 15 on an idle machine; on one that others keep busy, interpreters alone take a minute to start."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_late_joiner_contributes_soon_while_the_others_keep_stepping(swarm: Swarm) -> None:
    places = daemons(swarm, 4)
    training = {
        "samples": SAMPLES,
        "target": 4.0 * SAMPLES,
        "runs": {"int8": 10**9},
        "hidden": MILLIONS_10,
    }
    others = start(swarm, places, **training)
    eventually(lambda: all(len(learner.updates) >= 10 for learner in others), "updates of four", 180)
    started = time.monotonic()
    place = swarm.daemon(join=[places[1].address], args=LISTEN, wait=False)
    (newcomer,) = start(swarm, [place], first=4, peers=1, **training)
    eventually(lambda: contributed(newcomer) or not newcomer.process.running, "its contribution", 180)
    assert newcomer.process.running, newcomer.process.errors[-2000:]
    first = next(update for update in newcomer.updates if update.batches)
    everyone = [*others, newcomer]
    # One of the others may itself have missed a round just then, and be on its way back.
    eventually(lambda: max(shared(everyone), default=0) >= first.epoch, "an epoch of all five", 60)
    assert all(len(lineages) == 1 for lineages in shared(everyone).values())
    gaps = [gap for learner in others for gap in pauses(learner, started, first.at)]
    before = [gap for learner in others for gap in pauses(learner, 0.0, started)]
    print(
        f"contributed {first.at - started:.1f} s after its daemon and its script were started; meanwhile the others "
        f"made {len(gaps) // 4} updates, at the median one in "
        f"{statistics.median(gaps):.2f} s (before: {statistics.median(before):.2f}), at worst in {max(gaps):.2f} s "
        f"(before: {max(before):.2f})"
    )
    assert first.at - started <= NEWCOMER_SECONDS
    assert gaps, "the others kept stepping"


def contributed(learner: Learner) -> bool:
    """Whether some of its samples are in a mean."""
    return any(update.batches for update in learner.updates)


def pauses(learner: Learner, since: float, until: float) -> list[float]:
    """Seconds between its updates of that time."""
    times = [update.at for update in learner.updates if since <= update.at <= until]
    return [late - early for early, late in pairwise(times)]
