"""The demo's data is dealt fairly, and learning is the same wherever it happens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from equipoise.averaging.outcome import Outcome
from equipoise.peer.demo import trainer
from equipoise.peer.demo.options import BATCH, BATCHES_PER_PEER, DemoOptions
from equipoise.peer.demo.summary import Stepped
from equipoise.peer.demo.trainer import Digits, Learner, deal, split_digits, standardised, train_alone
from equipoise.peer.training.history import Record


@pytest.fixture(scope="module")
def halves() -> tuple[Digits, Digits]:
    return split_digits()


@pytest.mark.parametrize("peers", [2, 3, 4, 7])
def test_every_training_image_belongs_to_exactly_one_peer(halves: tuple[Digits, Digits], peers: int) -> None:
    training, _ = halves
    numbered = Digits(torch.arange(len(training.labels)).float()[:, None], training.labels)
    dealt = torch.cat([deal(numbered, index, peers).pixels[:, 0] for index in range(peers)])
    assert torch.equal(dealt.sort().values, numbered.pixels[:, 0])


def test_a_split_by_classes_gives_each_peer_two(halves: tuple[Digits, Digits]) -> None:
    for index in range(8):
        assert len(deal(halves[0], index, 8, "classes:each=2").labels.unique()) == 2


def test_a_drawn_peer_goes_through_its_share_and_learns(halves: tuple[Digits, Digits]) -> None:
    training, test = (standardised(half) for half in halves)
    learner = Learner(deal(training, 0, 4), seed=0, federated=True)
    untrained = learner.accuracy(test)
    assert learner.fit() > learner.fit()
    assert learner.accuracy(test) > max(untrained, 0.8)
    assert train_alone(deal(training, 0, 4), 0, 2, federated=True).digest() == learner.digest()


def test_the_halves_are_all_images_once(halves: tuple[Digits, Digits]) -> None:
    training, test = halves
    assert len(training.labels) + len(test.labels) == 1797
    assert len(test.labels) == 898
    assert float(training.pixels.max()) <= 1.0


def test_all_learners_start_from_the_same_parameters(halves: tuple[Digits, Digits]) -> None:
    training, _ = halves
    assert Learner(deal(training, 0, 4), seed=0).digest() == Learner(deal(training, 1, 4), seed=1).digest()


def test_an_epoch_sees_every_own_image_once(halves: tuple[Digits, Digits]) -> None:
    share = deal(halves[0], 0, 4)
    learner = Learner(share, seed=0)
    sizes = [learner.backward()[1] for _ in range(-(-len(share.labels) // BATCH))]
    assert sum(sizes) == len(share.labels)


def test_alone_makes_as_many_updates_each_of_a_peers_part_of_the_target(
    halves: tuple[Digits, Digits],
) -> None:
    share = deal(halves[0], 2, 4)
    by_hand = Learner(share, seed=2)
    for _ in range(3):
        by_hand.backward(BATCHES_PER_PEER)
        by_hand.optimizer.step()
    assert train_alone(share, 2, 3).digest() == by_hand.digest()


def test_a_gradient_of_several_batches_weighs_them_by_their_samples(halves: tuple[Digits, Digits]) -> None:
    """All batches of an epoch make the gradient of the whole share, though the last batch is smaller."""
    share = deal(halves[0], 0, 4)
    assert len(share.labels) % BATCH
    learner, whole = Learner(share, seed=0), Learner(share, seed=0)
    _, samples = learner.backward(-(-len(share.labels) // BATCH))
    assert samples == len(share.labels)
    torch.nn.functional.cross_entropy(whole.model(share.pixels), share.labels).backward()
    for ours, expected in zip(learner.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-6)


class MissesARound:
    """A federated training whose second round this peer misses: it fetches that round's mean."""

    def __init__(self, *arguments: Any, rounds: int, **options: Any) -> None:
        self._rounds = rounds
        self._records: list[Record] = []
        self.member = SimpleNamespace(last=None, image=lambda: torch.zeros(1))

    @property
    def ended(self) -> bool:
        return len(self._records) == self._rounds

    def step(self) -> Record:
        number = len(self._records) + 1
        group, given = ("a", "b"), {"a": 1.0, "b": 1.0}
        taken = Outcome(
            ok=True, reason="", group=group, contributors=given, digest=f"{number:064}", bytes_sent=number
        )
        if number != 2:
            self.member.last = taken
        self._records.append(Record.of(number, taken))
        return self._records[-1]

    def finish(self) -> None: ...


def test_a_round_whose_mean_was_fetched_counts_no_bytes(
    halves: tuple[Digits, Digits], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "Federated", MissesARound)
    learner = Learner(deal(halves[0], 0, 4), seed=0, federated=True)
    trainer.federated(SimpleNamespace(), learner, DemoOptions(rounds=3), halves[1])  # type: ignore[arg-type]
    told = [msgspec.json.decode(line, type=Stepped) for line in capsys.readouterr().out.splitlines()]
    size = sum(parameter.nbytes for parameter in learner.model.parameters())
    assert [(one.update, one.contributors, one.bytes_sent, one.bytes_saved) for one in told] == [
        (1, 2, 1, size - 1),
        (2, 2, 0, 0),
        (3, 2, 3, size - 3),
    ]
