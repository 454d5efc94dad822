"""Training with real daemons and real training scripts, each a process: what issue 4 promises of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e.learner import OPTIMIZERS
from e2e.learners import LISTEN, Learner, daemons, shared, start
from e2e.swarm import Swarm, eventually
from oracles.training import Nesterov, batch_of, difference, network, train_diloco, train_whole

pytestmark = pytest.mark.timeout(240)

UPDATES, FEWER_UPDATES, SAMPLES, PEERS = 50, 10, 8, 4


def replayed(learners: Sequence[Learner], run: str, clip: float | None = None) -> dict[str, torch.Tensor]:
    """The parameters of one process that makes the same updates, each from all its samples at once."""
    epochs: dict[int, list[tuple[int, int]]] = {}
    for learner in learners:
        for update in learner.updates:
            if update.run == run and update.batches:
                epochs.setdefault(update.epoch, []).extend((learner.task.index, n) for n in update.batches)
    assert sorted(epochs) == list(range(1, len(epochs) + 1))
    updates = [[batch_of(*which, SAMPLES) for which in epochs[epoch]] for epoch in sorted(epochs)]
    model = network()
    train_whole(model, OPTIMIZERS["adamw"], updates, clip)
    return dict(model.state_dict())


def test_four_peers_train_as_one_process_with_all_their_samples(swarm: Swarm, tmp_path: Path) -> None:
    places = daemons(swarm, PEERS)
    runs = {"fp32": UPDATES, "fp16": FEWER_UPDATES, "bf16": FEWER_UPDATES, "int8": FEWER_UPDATES}
    target = float(SAMPLES * PEERS)
    learners = start(swarm, places, runs=runs, samples=SAMPLES, target=target, save=str(tmp_path))
    ends = [learner.finish(180) for learner in learners]
    for which, (codec, updates) in enumerate(runs.items()):
        assert {end[which].epoch for end in ends} == {updates}
        assert len({end[which].lineage for end in ends}) == 1, codec
        assert len({end[which].digest for end in ends}) == 1, codec
        found = load_file(tmp_path / f"{codec}-0.safetensors")
        off = difference(found, replayed(learners, f"learn-{codec}"))
        print(f"{codec}: off by {off:.2g} after {updates} updates")
        if codec == "fp32":
            assert off <= 1e-5


def test_diloco_is_what_its_paper_says(swarm: Swarm, tmp_path: Path) -> None:
    workers, every, steps = 2, 5, 20
    learners = start(
        swarm,
        daemons(swarm, workers),
        runs={"fp32": steps},
        every=every,
        samples=SAMPLES,
        save=str(tmp_path),
    )
    ends = [end for learner in learners for end in learner.finish(120)]
    assert {end.epoch for end in ends} == {steps // every}
    assert len({end.lineage for end in ends}) == len({end.digest for end in ends}) == 1
    model = network()
    batches = [[batch_of(worker, number, SAMPLES) for number in range(steps)] for worker in range(workers)]
    train_diloco(model, OPTIMIZERS["adamw"], batches, every, Nesterov())
    assert difference(load_file(tmp_path / "fp32-0.safetensors"), dict(model.state_dict())) <= 1e-5


def test_a_peer_trains_alone_until_others_come_and_they_take_over_its_state(swarm: Swarm) -> None:
    places = daemons(swarm, 3)
    for_ever = {"runs": {"fp32": 10**9}, "samples": SAMPLES, "target": 3.0 * SAMPLES, "patience": 0.5}
    (veteran,) = start(swarm, places[:1], **for_ever)
    eventually(lambda: len(veteran.updates) >= 5, "updates of one alone", 60)
    assert not any(update.contributors for update in veteran.updates)
    newcomers = start(swarm, places[1:], first=1, peers=1, **for_ever)
    everyone = [veteran, *newcomers]
    eventually(lambda: all(together(learner) >= 5 for learner in everyone), "updates of all three", 60)
    for learner in everyone:
        learner.process.kill()
    alone = next(update for update in veteran.updates if update.contributors).before
    assert alone >= 5
    assert all(update.epoch == update.before + 1 for update in veteran.updates), (
        "nothing of its training was lost"
    )
    assert min(shared(everyone)) > alone
    assert all(len(lineages) == 1 for lineages in shared(everyone).values())


def together(learner: Learner) -> int:
    """How many updates it has made from what all three gave."""
    return sum(update.contributors == 3 for update in learner.updates)


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
