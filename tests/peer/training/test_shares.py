"""`Shares`: each live peer draws its own part of the data."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from equipoise.peer import DaemonLost, Run
from equipoise.peer.training import Shares
from equipoise.peer.training.shares import Pass
from fakes.world import World

SAMPLES, BATCH = 10_000, 50
FOUR = [f"peer{index}" for index in range(4)]


def join(world: World, name: str) -> Run:
    return world.join(name, "text", {"w": torch.zeros(300)})


def test_three_passes_with_a_peer_that_dies_and_one_that_comes(world: World) -> None:
    drawn: list[tuple[int, str, int]] = []

    def work(name: str, first: int = 0) -> None:
        run = join(world, name)
        run.wait_for(3)
        shares = Shares(run, range(SAMPLES))
        shares.set_epoch(first)
        for number in range(first, 3):
            for at, sample in enumerate(shares):
                drawn.append((number, name, sample))
                if at % BATCH == 0:
                    world.compute(1.0)

    for name in FOUR:
        world.peer(name, lambda name=name: work(name))  # type: ignore[misc]
    world.time.at(70.0, lambda: world.kill("peer3"))  # In the second pass: one takes 50 s.
    world.peer("peer4", lambda: work("peer4", 2), at=145.0)  # In the third.
    world.run()

    twice, missed = [], []
    for number in range(3):
        times = Counter(sample for at, _, sample in drawn if at == number)
        twice.append({sample for sample, count in times.items() if count > 1})
        missed.append(set(range(SAMPLES)) - times.keys())
    held = set(Pass(SAMPLES, 0, 1, "peer3", FOUR).left.tolist())
    taken = {sample for number, name, sample in drawn if name == "peer4"}
    assert (twice[0], missed[0]) == (set(), set())
    assert twice[1] == set()
    assert missed[1] == held - {sample for number, name, sample in drawn if (number, name) == (1, "peer3")}
    assert 0 < len(missed[1]) < SAMPLES // 4
    assert missed[2] == set()
    assert twice[2] < taken
    counts = Counter(name for _, name, _ in drawn)
    assert counts["peer0"] < 8200, "it has handed over a part: without, it draws 8333"


@pytest.mark.parametrize("count", [0, 1, 10_000, 200_000])
def test_parts_are_even_and_whole(count: int) -> None:
    parts = [Pass(count, 7, 2, me, FOUR) for me in FOUR]
    assert sorted(sample for part in parts for sample in part.left.tolist()) == list(range(count))
    assert max(map(len, parts)) <= 1.1 * count / 4 + 1
    again = Pass(count, 7, 3, "peer0", FOUR)
    assert count < 2 or set(again.left.tolist()) != set(parts[0].left.tolist())


def test_a_newcomer_takes_from_all_and_nothing_changes_hands_between_the_others() -> None:
    parts = {me: Pass(SAMPLES, 0, 0, me, FOUR) for me in FOUR}
    before = {me: [part.draw() for _ in range(100)] + part.left.tolist() for me, part in parts.items()}
    for part in parts.values():
        part.meet([*FOUR, "peer4"])
        part.meet(FOUR[:1])  # Peers that leave take nothing back.
    new = Pass(SAMPLES, 0, 0, "peer4", FOUR)
    for me, part in parts.items():
        kept = set(part.left.tolist())
        assert kept < set(before[me])
        assert set(before[me][100:]) - kept <= set(new.left.tolist())
        assert part.left.tolist() == [one for one in before[me][100:] if one in kept], "the order stays"
        assert len(part) == 100 + len(kept)
    first = [parts["peer0"].left[at] for at in range(20)]
    assert first != sorted(first)


class Dataset(list[int]):
    """As those of Hugging Face."""

    def select(self, indices: list[int]) -> list[int]:
        return [self[at] for at in indices]


def test_split_takes_what_the_sampler_would_and_a_lost_daemon_changes_nothing(world: World) -> None:
    def work(index: int) -> tuple[list[int], list[int], list[int]]:
        run = join(world, f"peer{index}")
        run.wait_for(1)
        shares = Shares(run, range(100), seed=3)
        told = len(shares)
        first = shares.split(Dataset(range(100)))
        world.compute(0.1)  # Both have split.
        run.core.link.lost = DaemonLost("killed in this test")
        second = list(torch.utils.data.DataLoader(range(100), sampler=shares, batch_size=None))  # type: ignore[arg-type]
        shares.set_epoch(0)
        assert list(shares) == first
        assert told == len(first) == len(shares)
        return first, second, list(shares.split(range(100)))

    parts = world.each(2, work)
    for one in range(3):
        assert sorted([*parts[0][one], *parts[1][one]]) == list(range(100))
    assert parts[0][1] == parts[0][2] != parts[0][0]


def test_data_that_are_streamed_are_refused(world: World) -> None:
    run = join(world, "peer0")
    with pytest.raises(
        TypeError, match="expected a data set with a length, got generator: give each peer other"
    ):
        Shares(run, (one for one in "abc"))  # type: ignore[arg-type]
