"""Federated rounds of simulated peers: the peers that train, deaths, late peers, a hundred peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from equipoise.peer import Run
from equipoise.peer.simulation import SimulatedPeer, partition, simulate
from equipoise.peer.training import Federated, Task
from fakes.world import World


def fits(
    strategy: str, seconds: Mapping[int, float], rounds: int, peers: int, observer: int = -1, **options: Any
) -> tuple[list[Any], list[tuple[float, int, int]]]:
    """Histories of peers whose training takes some virtual seconds, and who trained when for which round."""
    trained: list[tuple[float, int, int]] = []

    def work(peer: SimulatedPeer, index: int) -> Any:
        peer.tags = ("gpu",) if index % 2 == 0 else ()
        w = torch.zeros(300)

        def fit(task: Task) -> tuple[float, dict[str, float]]:
            trained.append((peer.clock(), index, task.number))
            peer.compute(seconds.get(index, 1.0))
            w.add_(index + 1)
            return 1.0, {"index": float(index)}

        def evaluate(task: Task) -> tuple[float, dict[str, float]]:
            return 1.0, {"w": float(w.mean())}

        with peer.join("fits", [w], strategy=strategy, codec="fp32") as run:
            federated = Federated(run, None if index == observer else fit, evaluate, rounds=rounds)
            history = federated.run()
        return history, federated.member.id, w

    return simulate(work, peers, **options), trained


def alike(ends: list[Any]) -> list[Any]:
    """The history that all living peers have, alike, with models that are bit by bit the same."""
    living = [one for one in ends if one is not None]
    assert len({state for _, state, _ in living}) == 1
    assert all(torch.equal(model, living[0][2]) for _, _, model in living)
    agreed = [
        [(r.number, r.contributors, r.metrics, r.evaluation, r.digest) for r in h] for h, _, _ in living
    ]
    assert all(one == agreed[0] for one in agreed)
    return list(living[0][0])


def test_only_peers_that_have_a_fit_and_carry_the_tags_train() -> None:
    ends, trained = fits("federated:tags=gpu", {}, rounds=2, peers=7, observer=2)
    assert {index for _, index, _ in trained} == {0, 4, 6}
    assert [len(record.drawn) for record in alike(ends)] == [3, 3]


def test_a_round_closes_some_seconds_after_its_quorum_and_tells_the_late_how_late() -> None:
    seconds = {0: 0.0, 1: 0.0, 2: 0.5, 3: 3.0, 4: 12.0, 5: 12.0}
    ends, trained = fits("federated:quorum=3,grace=4", seconds, rounds=1, peers=6)
    history = alike(ends)
    began = min(at for at, _, _ in trained)
    assert len(history[0].contributors) == 4
    assert ends[0][0][-1].seconds == pytest.approx(began + 4.5, abs=0.5)
    assert [round(one[0][-1].late, 1) for one in ends] == [0, 0, 0, 0, 7.5, 7.5]
    assert sorted(index for _, index, _ in trained) == [0, 1, 2, 3, 4, 5]


class Ended(NamedTuple):
    """The end of one peer: its model, and the metrics and evaluations of all rounds."""

    model: torch.Tensor
    values: list[Any]
    digest: str


def regression(join: Callable[..., Run], index: int) -> Ended:
    """Local regression on a peer's own data, in three rounds of eight peers."""
    chance = torch.Generator().manual_seed(index)
    inputs = torch.randn(40, 30, generator=chance)
    targets = inputs.sum(1) + index
    weights = torch.zeros(30)

    def loss() -> torch.Tensor:
        return (inputs @ weights - targets).square().mean()

    def fit(task: Task) -> tuple[float, dict[str, float]]:
        for _ in range(3):
            weights.sub_(0.02 * inputs.T @ (inputs @ weights - targets) / 20)
        return 1.0 + index, {"loss": float(loss())}

    def evaluate(task: Task) -> tuple[float, dict[str, float]]:
        return 1.0, {"loss": float(loss())}

    strategy = "federated:available=8,minimum=8,quorum=8"
    with join("alike", [weights], strategy=strategy, codec="fp32") as run:
        history = Federated(run, fit, evaluate, "fedadam", rounds=3).run()
    return Ended(weights, [(one.metrics, one.evaluation) for one in history], history[-1].digest)


def test_eight_simulated_peers_equal_eight_daemons_in_virtual_time() -> None:
    world = World()
    real = world.each(8, lambda index: regression(partial(world.join, f"peer{index}"), index))
    simulated = [
        one for one in simulate(lambda peer, index: regression(peer.join, index), 8) if one is not None
    ]
    assert len({one.digest for one in real}) == len({one.digest for one in simulated}) == 1
    for here, there in zip(real, simulated, strict=True):
        torch.testing.assert_close(there.model, here.model, rtol=0, atol=1e-5)
        for (metrics, evaluation), (mine, before) in zip(there.values, here.values, strict=True):
            assert (metrics, evaluation) == (pytest.approx(mine, rel=1e-5), pytest.approx(before, rel=1e-5))
    assert float(real[0].model.abs().max()) > 0.1


def learns_digits(peers: int, rounds: int, seed: int) -> list[Any]:
    """Digest and accuracy of each peer, after federated rounds in which a tenth of them is drawn."""
    from equipoise.peer.demo.trainer import split_digits  # Loads scikit-learn, which takes seconds.

    training, _ = split_digits()
    parts = partition(training.labels.numpy(), peers, "dirichlet:alpha=1", seed=3)

    def work(peer: SimulatedPeer, index: int) -> tuple[str, float]:
        torch.manual_seed(1)
        model = torch.nn.Linear(64, 10)
        mine = training.pick(torch.from_numpy(parts[index]))

        def fit(task: Task) -> tuple[float, dict[str, float]]:
            inner = torch.optim.SGD(model.parameters(), 0.5)
            for _ in range(2):
                inner.zero_grad()
                torch.nn.functional.cross_entropy(model(mine.pixels), mine.labels).backward()
                inner.step()
            peer.compute(len(mine.labels) / 10)
            return max(len(mine.labels), 1), {}

        def evaluate(task: Task) -> tuple[float, dict[str, float]]:
            hits = (model(mine.pixels).argmax(1) == mine.labels).float()
            return len(hits), {"accuracy": float(hits.mean()) if len(hits) else 0.0}

        with peer.join("digits", model, strategy="federated:fraction=0.1,minimum=2") as run:
            history = Federated(run, fit, evaluate, rounds=rounds).run()
        return history[-1].digest, history[-1].evaluation["accuracy"]

    return simulate(work, peers, seed=seed)


def test_the_same_seed_gives_the_same_digest_and_another_gives_another() -> None:
    first, again, other = (
        alike(fits("federated:fraction=0.5", {}, 3, 6, seed=seed)[0]) for seed in (0, 0, 1)
    )
    assert first == again
    assert first[-1].digest != other[-1].digest


@pytest.mark.slow
def test_a_hundred_peers_learn_digits_in_twenty_rounds() -> None:
    first, again = (learns_digits(100, 20, 0) for _ in range(2))
    assert len(set(first)) == 1
    assert first == again
    assert first[0][1] > 0.7


def test_as_many_contribute_as_a_real_group_may_have_and_the_others_follow() -> None:
    ends, _ = fits("federated:minimum=66", {}, rounds=1, peers=66)
    assert [len(record.contributors) for record in alike(ends)] == [64]


def assert_sound(seed: int) -> None:
    """Some peers train for times drawn by chance, begin late or die; the others end alike, and none trains twice."""
    chance = Random(seed)
    peers, scale = chance.randint(3, 9), chance.choice([0.0, 0.5, 5.0])
    late, fraction, grace = (
        chance.choice(["drop", "next"]),
        chance.choice([0.3, 0.5, 1]),
        chance.choice([0, 1, 5]),
    )
    doomed = chance.sample(range(peers), chance.randint(0, peers - 3))
    kill = {index: chance.uniform(0, 30) for index in doomed}
    begins = [chance.choice([0, 0, 0, chance.uniform(0, scale)]) for _ in range(peers)]

    def work(peer: SimulatedPeer, index: int) -> Any:
        own, w, trained = Random(seed * 100 + index), torch.zeros(300), []
        peer.compute(begins[index])

        def fit(task: Task) -> tuple[float, dict[str, float]]:
            trained.append(federated.member.id)
            peer.compute(own.uniform(0, scale))
            w.add_(index + 1)
            return 1.0 + index, {"index": float(index)}

        def evaluate(task: Task) -> tuple[float, dict[str, float]]:
            peer.compute(own.uniform(0, 0.1))
            return 1.0, {"w": float(w.mean())}

        strategy = f"federated:fraction={fraction},minimum=2,grace={grace},late={late}"
        with peer.join("sound", [w], strategy=strategy) as run:
            federated = Federated(run, fit, evaluate, "fedadam", rounds=8)
            history = federated.run()
        assert len(trained) == len(set(trained))
        return history, federated.member.id, w

    assert len(alike(simulate(work, peers, seed=seed, kill=kill))) == 8


@pytest.mark.parametrize("seed", range(5))
def test_faults_leave_all_peers_alike(seed: int) -> None:
    assert_sound(seed)


@pytest.mark.slow
def test_any_faults_leave_all_peers_alike() -> None:
    for seed in range(5, 300):
        assert_sound(seed)
