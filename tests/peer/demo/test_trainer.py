"""The demo's data is dealt fairly, and learning is the same wherever it happens."""

from __future__ import annotations

import pytest
import torch

from equipoise.peer.demo.trainer import (
    BATCH,
    BATCHES_PER_PEER,
    Digits,
    Learner,
    deal,
    split_digits,
    standardised,
    train_alone,
)


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
