"""The demo's data is dealt fairly, and learning is the same wherever it happens."""

from __future__ import annotations

import pytest
import torch

from equipoise.peer.demo.digits import Digits, deal, split_digits
from equipoise.peer.demo.learner import Learner, train_alone
from equipoise.peer.demo.options import BATCH


@pytest.fixture(scope="module")
def halves() -> tuple[Digits, Digits]:
    return split_digits()


@pytest.mark.parametrize("peers", [2, 3, 4, 7])
def test_every_training_image_belongs_to_exactly_one_peer(halves: tuple[Digits, Digits], peers: int) -> None:
    training, _ = halves
    numbered = Digits(torch.arange(len(training.labels)).float()[:, None], training.labels)
    dealt = torch.cat([deal(numbered, index, peers).pixels[:, 0] for index in range(peers)])
    assert torch.equal(dealt.sort().values, numbered.pixels[:, 0])


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


def test_alone_is_what_the_same_updates_by_hand_give(halves: tuple[Digits, Digits]) -> None:
    share = deal(halves[0], 2, 4)
    by_hand = Learner(share, seed=2)
    for _ in range(3):
        by_hand.backward()
        by_hand.update()
    assert train_alone(share, 2, [1, 1, 1]).digest() == by_hand.digest()


def test_alone_weighs_batches_by_their_samples(halves: tuple[Digits, Digits]) -> None:
    """All batches of an epoch make the gradient of the whole share, though the last batch is smaller."""
    share = deal(halves[0], 0, 4)
    assert len(share.labels) % BATCH
    alone = train_alone(share, 0, [-(-len(share.labels) // BATCH)])
    whole = Learner(share, seed=0)
    torch.nn.functional.cross_entropy(whole.model(share.pixels), share.labels).backward()
    for ours, expected in zip(alone.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_a_state_is_all_that_the_next_update_depends_on(halves: tuple[Digits, Digits]) -> None:
    ahead, behind = (Learner(deal(halves[0], 0, 4), seed=0) for _ in range(2))
    for _ in range(3):
        ahead.backward()
        ahead.update()
    with torch.no_grad():
        for name, tensor in behind.state().items():
            tensor.copy_(ahead.state()[name])
    assert behind.updates == 3
    for parameter, other in zip(behind.model.parameters(), ahead.model.parameters(), strict=True):
        parameter.grad = other.grad
    ahead.update()
    behind.update()
    assert behind.digest() == ahead.digest()
