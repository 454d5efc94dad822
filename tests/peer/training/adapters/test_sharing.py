"""Loaders that shuffle draw shares of data sets that several peers have, and all of data that one peer has."""

from __future__ import annotations

import logging
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from equipoise.peer.training.adapters.sharing import sampling_of, share
from equipoise.peer.training.shares import mark_of
from fakes.world import World

SAMPLES, BATCH = 1200, 10


def data(kind: int) -> TensorDataset:
    """Data sets of equal length; their samples are numbered."""
    return TensorDataset(torch.arange(SAMPLES), torch.full((SAMPLES,), kind))


def test_peers_with_equal_data_share_them_and_others_draw_all_of_theirs(world: World) -> None:
    def work(at: int) -> tuple[list[int], list[int]]:
        run = world.join(f"peer{at}", "text", {"w": torch.zeros(300)})
        run.wait_for(3)
        loader = DataLoader(data(max(at, 1)), BATCH, shuffle=True)
        share(run, [loader], wanted=True)
        if at < 2:
            world.compute(1.0)  # Each has told what data it has.
        assert len(loader) == SAMPLES // BATCH
        passes: list[list[int]] = []
        for _ in range(2):
            passes.append([])
            for numbers, _kind in loader:
                passes[-1] += numbers.tolist()
                world.compute(1.0)
        return passes[0], passes[1]

    first, second, third, _ = world.each(4, work)
    assert [Counter(one) for one in third] == [Counter(range(SAMPLES))] * 2, "it is alone with its data"
    halves = [one[0][: int(0.9 * SAMPLES / 2)] for one in (first, second)]
    assert len(set(halves[0])) == len(set(halves[1])) == len(halves[0])
    assert not set(halves[0]) & set(halves[1])
    drawn = Counter(number for one in (first, second) for each in one for number in each)
    assert min(drawn.values()) >= 2, "four passes: each peer's epochs are as long as the data"
    assert len(drawn) == SAMPLES


@pytest.mark.parametrize(
    ("options", "wanted", "told"),
    [
        ({"shuffle": True}, True, "an equal data set (1200 samples) draw a share of it each"),
        ({"shuffle": True}, False, "shares=False: this peer draws all of its data"),
        ({}, True, "does not shuffle them (SequentialSampler)"),
        ({"sampler": torch.utils.data.RandomSampler(data(0), num_samples=5)}, True, "(RandomSampler)"),
        ({"sampler": torch.utils.data.RandomSampler(range(5))}, True, "(RandomSampler)"),
    ],
)
def test_the_log_says_what_is_done(
    world: World, caplog: pytest.LogCaptureFixture, options: dict[str, Any], wanted: bool, told: str
) -> None:
    caplog.set_level(logging.INFO)
    loader: Any = DataLoader(data(0), BATCH, **options)
    before = loader.batch_sampler.sampler
    share(world.join("peer0", "text", {"w": torch.zeros(300)}), [loader], wanted)
    assert told in caplog.text
    assert (loader.batch_sampler.sampler is before) == ("draw a share" not in told)


def test_a_second_data_set_is_not_shared(world: World, caplog: pytest.LogCaptureFixture) -> None:
    loaders = [DataLoader(data(kind), BATCH, shuffle=True) for kind in (1, 1, 2)]
    share(world.join("peer0", "text", {"w": torch.zeros(300)}), loaders, wanted=True)
    assert [type(sampling_of(one).sampler).__name__ for one in loaders] == [
        "EndlessShares",
        "EndlessShares",
        "RandomSampler",
    ]
    assert "they are a second data set" in caplog.text


def test_marks_tell_data_sets_apart_by_length_and_samples_whatever_the_chance() -> None:
    class Noisy(list[Any]):
        def __getitem__(self, at: Any) -> Any:
            chance = [torch.rand(3), random.random(), np.random.rand()]
            return {"text": super().__getitem__(at), "image": chance, "of": object()}

    marks = [mark_of(one) for one in (Noisy("abcd"), Noisy("abce"), Noisy("abcdd"), [], data(1), data(2))]
    assert len(set(marks)) == 6
    torch.rand(1)
    assert mark_of(Noisy("abcd")) == marks[0]
    with pytest.raises(TypeError, match="give each peer other files, or shards"):
        mark_of(iter("abc"))
