"""Virtual time: which peer goes on when, what ends a simulation, and that nothing of it stays behind."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from equipoise.peer.simulation import SimulatedPeer, SimulationError, simulate, virtual_time


def test_the_peer_whose_wait_ends_first_goes_on() -> None:
    seen: list[tuple[int, float]] = []

    def work(peer: SimulatedPeer, index: int) -> float:
        for _ in range(3):
            peer.compute(1.0 + index)
            seen.append((index, peer.clock()))
        return peer.clock()

    assert simulate(work, 3) == [3.0, 6.0, 9.0]
    assert seen == [(0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4), (2, 6), (1, 6), (2, 9)]


def test_a_killed_peer_ends_at_its_wait_and_returns_none() -> None:
    reached: list[float] = []

    def work(peer: SimulatedPeer, index: int) -> int:
        for _ in range(4):
            peer.compute(1.0)
            if index == 1:
                reached.append(peer.clock())
        return index

    assert simulate(work, 3, kill={1: 2.5, 2: 100.0}) == [0, None, 2]
    assert reached == [1.0, 2.0]


def test_what_work_raises_is_raised_with_the_peer_named_and_ends_the_others() -> None:
    ended: list[int] = []

    def work(peer: SimulatedPeer, index: int) -> None:
        try:
            peer.compute(float(index + 1))
            if index == 1:
                raise KeyError("its own")
            peer.compute(1e9)
        finally:
            ended.append(index)

    before = threading.active_count()
    with pytest.raises(KeyError, match="its own") as raised:
        simulate(work, 4)
    assert raised.value.__notes__ == ["raised by the work of simulated peer 1"]
    assert sorted(ended) == [0, 1, 2, 3]
    assert threading.active_count() == before


def test_peers_that_wait_for_ever_are_an_error_that_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "STUCK_SECONDS", 600.0)

    def work(peer: SimulatedPeer, index: int) -> None:
        run = peer.join("never", [torch.zeros(4)])
        while not run.average(timeout=60.0).ok:
            pass

    with pytest.raises(
        SimulationError,
        match=r"peer 0 waits for a round: no other peer of this run",
    ) as raised:
        simulate(work, 1)
    assert "\n" not in str(raised.value)


def test_a_loop_that_only_asks_gets_ahead() -> None:
    def work(peer: SimulatedPeer, index: int) -> float:
        run = peer.join("asks", [torch.full((4,), float(index))])
        peer.compute(float(index))
        pending = run.average(wait=False)
        while not pending.done():
            pass
        return peer.clock()

    assert simulate(work, 2) == pytest.approx([1.13, 1.13], abs=0.011)


def test_each_peer_has_its_own_random_numbers_whatever_the_others_draw() -> None:
    def drawn(greedy: bool) -> list[object]:
        def work(peer: SimulatedPeer, index: int) -> list[float]:
            numbers = []
            for _ in range(3):
                numbers += [random.random(), float(np.random.rand()), float(torch.rand(()))]
                if greedy and index == 0:
                    numbers += torch.rand(7).tolist()
                peer.compute(0.5)
            return numbers

        return list(simulate(work, 3, seed=5))

    plain, greedy = drawn(False), drawn(True)
    assert plain[1:] == greedy[1:]
    assert plain[1] != plain[2]


def test_the_callers_random_numbers_and_threads_stay_as_they_are() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    threads = torch.get_num_threads()
    expected = float(torch.rand(())), random.random(), float(np.random.rand())
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert simulate(lambda peer, index: float(torch.rand(())), 2) != [None, None]
    assert (float(torch.rand(())), random.random(), float(np.random.rand())) == expected
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("peers", [0, -1, 513, 2.0, True])
def test_numbers_of_peers_out_of_range_are_refused(peers: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 512 peers"):
        simulate(lambda peer, index: None, peers)


@pytest.mark.parametrize("kill", [{3: 1.0}, {-1: 1.0}, {0: -1.0}, {0: float("nan")}, {0: float("inf")}])
def test_kills_out_of_range_are_refused(kill: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="expected kill as"):
        simulate(lambda peer, index: None, 3, kill=kill)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "1"])
def test_computations_out_of_range_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number of seconds"):
        simulate(lambda peer, index: peer.compute(seconds), 1)
