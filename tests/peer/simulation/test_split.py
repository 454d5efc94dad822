"""How samples are dealt: each once, to nobody none, and as unevenly as was asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.peer.simulation import partition

LABELS = np.random.default_rng(1).integers(0, 10, 1797)

every_way = pytest.mark.parametrize(
    "how", ["iid", "dirichlet:alpha=0.3", "dirichlet:alpha=0.001", "classes:each=2"]
)


def dealt_once(parts: list[np.ndarray], samples: int) -> bool:
    return sorted(np.concatenate(parts).tolist()) == list(range(samples))


@every_way
@pytest.mark.parametrize("peers", [1, 5, 8, 100])
def test_every_sample_is_dealt_once_and_no_peer_has_none(how: str, peers: int) -> None:
    peers = max(peers, 5) if how.startswith("classes") else peers  # Or some classes would have no peer.
    parts = partition(LABELS, peers, how)
    assert len(parts) == peers
    assert dealt_once(parts, len(LABELS))
    assert all(len(part) and part.dtype == np.int64 and bool((np.diff(part) > 0).all()) for part in parts)


@every_way
def test_the_seed_alone_decides(how: str) -> None:
    first, again, other = (partition(LABELS, 8, how, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(np.array_equal(one, two) for one, two in zip(first, other, strict=True))


@every_way
@given(
    labels=st.lists(st.integers(0, 3), min_size=2, max_size=30).map(lambda some: [0, 1, *some]),
    peers=st.integers(2, 40),
    seed=st.integers(0, 9),
)
def test_any_labels_are_dealt_once(how: str, labels: list[int], peers: int, seed: int) -> None:
    parts = partition(labels, peers, how, seed)
    dealt = np.concatenate(parts).tolist()
    assert len(set(dealt)) == len(dealt)
    if how.startswith("classes"):
        covered = 2 * peers >= len(set(labels))
        assert {labels[index] for index in dealt} == set(labels) or not covered
    else:
        assert len(dealt) == len(labels)
        assert sum(not len(part) for part in parts) == max(peers - len(labels), 0)


def test_equal_shares_are_equal_but_for_one() -> None:
    sizes = {len(part) for part in partition(LABELS, 8, "iid")}
    assert sizes == {224, 225}
    counts = [np.bincount(LABELS[part], minlength=10) for part in partition(LABELS, 4, "iid")]
    assert min(map(min, counts)) > 20


def test_a_small_alpha_is_more_uneven_than_a_large_one() -> None:
    def most_common(alpha: str) -> float:
        """Mean over the peers of the share of a peer's most common label."""
        parts = partition(LABELS, 8, f"dirichlet:alpha={alpha}")
        return float(np.mean([np.bincount(LABELS[part]).max() / len(part) for part in parts]))

    assert most_common("0.01") > 0.7 > 0.5 > most_common("0.3") > 0.25 > most_common("100")


@pytest.mark.parametrize(("peers", "each"), [(8, 2), (5, 2), (100, 1), (3, 10), (7, 3)])
def test_each_peer_has_so_many_classes_and_classes_have_as_many_peers(peers: int, each: int) -> None:
    parts = partition(LABELS, peers, f"classes:each={each}")
    classes = [set(LABELS[part].tolist()) for part in parts]
    assert all(len(own) == each for own in classes)
    takers = [sum(label in own for own in classes) for label in range(10)]
    assert max(takers) - min(takers) <= 1
    assert dealt_once(parts, len(LABELS))


def test_samples_of_classes_that_nobody_has_are_dealt_to_nobody() -> None:
    parts = partition(LABELS, 3, "classes:each=2")
    classes = {label for part in parts for label in LABELS[part].tolist()}
    assert len(classes) == 6
    assert sum(map(len, parts)) == sum(label in classes for label in LABELS.tolist())


def test_an_empty_peer_gets_only_what_its_classes_allow() -> None:
    labels = ["a"] * 3 + ["b"] * 40
    for seed in range(10):
        parts = partition(labels, 12, "classes:each=1", seed)
        assert all(len({labels[index] for index in part}) <= 1 for part in parts)
        assert sum(not len(part) for part in parts) == 3


def test_labels_may_be_words_or_tensors() -> None:
    words = [f"class {label}" for label in LABELS]
    for labels in (words, torch.tensor(LABELS), LABELS.tolist()):
        parts = partition(labels, 8, "classes")
        assert all(
            np.array_equal(one, two) for one, two in zip(parts, partition(LABELS, 8, "classes"), strict=True)
        )


@pytest.mark.parametrize(
    ("labels", "peers", "how", "said"),
    [
        ([0, 1], 2, "dirichle", "unknown split 'dirichle'; .*did you mean 'dirichlet'"),
        ([0, 1], 2, "dirichlet:alpha=0", "dirichlet: expected alpha above 0, got 0.0"),
        ([0, 1], 2, "classes:each=0", "classes: expected at least 1 class for each peer, got 0"),
        ([0, 1], 2, "classes:each=3", "classes: expected at most 2 for each peer, as there are, got 3"),
        ([[0], [1]], 2, "iid", r"one label for each sample, got an array of shape \[2, 1\]"),
        ([0, 1], 0, "iid", "expected at least 1 peer, got 0"),
        ([0, 1], 1.5, "iid", "expected at least 1 peer, got 1.5"),
    ],
)
def test_arguments_out_of_range_are_refused(labels: list, peers: int, how: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        partition(labels, peers, how)
