"""The demo's data is dealt fairly, and all peers start alike."""

from __future__ import annotations

import pytest

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.peer.demo.trainer import Digits, Learner, deal, how, split_digits
from equipoise.peer.training import Record


@pytest.fixture(scope="module")
def halves() -> tuple[Digits, Digits]:
    return split_digits()


def test_the_halves_are_all_images_once(halves: tuple[Digits, Digits]) -> None:
    training, test = halves
    assert (len(training.labels), len(test.labels)) == (899, 898)
    assert float(training.pixels.mean()) == pytest.approx(0, abs=0.05)
    assert float(training.pixels.std()) == pytest.approx(1, abs=0.05)


def test_all_learners_start_from_the_same_parameters_and_learn(halves: tuple[Digits, Digits]) -> None:
    training, test = halves
    first, second = (Learner(deal(training, index, 4), seed=index) for index in range(2))
    assert first.digest() == second.digest()
    untrained = first.accuracy(test)
    assert first.fit() > first.fit()
    assert first.accuracy(test) > max(untrained, 0.7)
    assert first.digest() != second.digest()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, "local steps"),
        (
            Outcome(ok=True, reason="", contributors={"a": 64, "b": ATTENDANCE_LIMIT}, bytes_sent=500),
            "by 1 peer, 500 bytes sent",
        ),
        (Record(number=1, contributors={"a": 9, "b": 9}, bytes_sent=500), "by 2 peers, 500 bytes sent"),
    ],
)
def test_only_peers_whose_work_counts_are_told(result: Outcome | Record | None, expected: str) -> None:
    assert how(result) == expected
