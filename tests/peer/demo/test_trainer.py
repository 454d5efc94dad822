"""The demo's data is dealt fairly, and all peers start alike."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("peers", [2, 3, 4, 7])
def test_every_training_image_belongs_to_exactly_one_peer(halves: tuple[Digits, Digits], peers: int) -> None:
    training, _ = halves
    numbered = Digits(torch.arange(len(training.labels)).float()[:, None], training.labels)
    dealt = torch.cat([deal(numbered, index, peers).pixels[:, 0] for index in range(peers)])
    assert torch.equal(dealt.sort().values, numbered.pixels[:, 0])


def test_a_split_by_classes_gives_each_peer_two(halves: tuple[Digits, Digits]) -> None:
    for index in range(8):
        assert len(deal(halves[0], index, 8, "classes:each=2").labels.unique()) == 2


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
        (
            Outcome(
                ok=True,
                reason="they meet",
                contributors={"a": ATTENDANCE_LIMIT, "b": ATTENDANCE_LIMIT},
                bytes_sent=500,
            ),
            "local steps",
        ),
    ],
)
def test_only_peers_whose_work_counts_are_told(result: Outcome | Record | None, expected: str) -> None:
    assert how(result) == expected
