"""Gossip among real daemons: exchanges of two, both or neither; and training for which the loop never waits."""

from __future__ import annotations

import threading

import pytest
import torch

from e2e.swarm import DaemonProcess, eventually
from e2e.threads import together
from equipoise.averaging.timing import INITIAL_WAIT
from equipoise.peer import Idle, Outcome, Run, connect
from equipoise.peer.training import Gossip
from oracles.training import batch_of, loss_of, network

PEERS, VALUES = 4, 100_000


def spread_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack(tensors).std(0).mean())


def test_every_exchange_is_of_two_and_the_sum_is_kept(places: list[DaemonProcess]) -> None:
    chance = torch.Generator().manual_seed(0)
    tensors = [torch.randn(VALUES, generator=chance) for _ in places]
    total, before = torch.stack(tensors).sum(0), spread_of(tensors)
    done = [0] * PEERS
    enough, met = threading.Event(), threading.Barrier(PEERS)

    def exchange(place: DaemonProcess, tensor: torch.Tensor) -> list[Outcome]:
        outcomes = []
        with (
            connect(place.home) as peer,
            peer.join("pairs", [tensor], strategy="gossip", codec="fp32") as run,
        ):
            assert run.wait_for(PEERS - 1)
            met.wait(60.0)
            while not enough.is_set():
                outcomes.append(run.average(timeout=5.0))
                done[places.index(place)] = sum(outcome.ok for outcome in outcomes)
                if min(done) >= 20:
                    enough.set()
            shown = peer.status().runs[0].exchanges
            assert shown is not None
            assert shown.ok == sum(outcome.ok for outcome in outcomes)
            assert shown.in_doubt == 0
        return outcomes

    outcomes = [one for each in together(exchange, places, tensors) for one in each]
    ok = [outcome for outcome in outcomes if outcome.ok]
    assert all(len(one.contributors) == 2 for one in ok)
    digests = [one.digest for one in ok]
    half = [one for one in ok if digests.count(one.digest) != 2]
    assert not half, f"applied at both, or at neither; {[outcome for outcome in outcomes if not outcome.ok]}"
    torch.testing.assert_close(torch.stack(tensors).sum(0), total, rtol=0, atol=1e-4)
    assert spread_of(tensors) < before / 50


def test_training_exchanges_and_ends_with_one_model(places: list[DaemonProcess]) -> None:
    def train(place: DaemonProcess) -> tuple[torch.Tensor, int, Run]:
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        index = places.index(place)
        with connect(place.home) as peer, peer.join("lessons", model, strategy="gossip", group_size=2) as run:
            with Gossip(run, every=5, wait_for=PEERS - 1) as gossip:
                for number in range(100_000):
                    sgd.zero_grad()
                    loss_of(model, batch_of(index, number, 8)).backward()
                    sgd.step()
                    if all(one >= 3 for one in exchanged.values()):
                        break
                    exchanged[index] = gossip.exchanged
                    pause.wait(0.005)  # What a step of a larger model takes.
                all_here.wait(60.0)
            assert gossip.finished is not None
            weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
            return weights, len(gossip.finished.contributors), run

    exchanged = dict.fromkeys(range(PEERS), 0)
    pause, all_here = threading.Event(), threading.Barrier(PEERS)
    ends = together(train, places)
    assert all(count == PEERS for _, count, _ in ends), "all end together"
    assert all(torch.equal(weights, ends[0][0]) for weights, _, _ in ends), "with one model"


def test_shift_moves_tensors_by_the_difference_and_keeps_changes_made_meanwhile(
    places: list[DaemonProcess],
) -> None:
    values, weights, added = [torch.arange(8.0), -3 * torch.ones(8)], [1.0, 3.0], [10.0, 20.0]
    copied = threading.Barrier(2)

    def move(at: int) -> tuple[Outcome, torch.Tensor]:
        tensor = values[at].clone()
        with connect(places[at].home) as peer, peer.join("moved", {"w": tensor}, codec="fp32") as run:
            eventually(lambda: run.state == Idle(peers=1), "the other peer")
            copied.wait(60.0)
            pending = run.shift(weights[at])
            tensor += added[at]
            return pending.result(), tensor

    for at, (outcome, tensor) in enumerate(together(move, range(2))):
        assert sorted(outcome.contributors.values()) == weights, outcome
        mean = (weights[0] * values[0] + weights[1] * values[1]) / sum(weights)
        torch.testing.assert_close(tensor, mean + added[at])


@pytest.mark.slow
def test_a_straggler_ends_with_the_others(places: list[DaemonProcess]) -> None:
    def end(place: DaemonProcess) -> Outcome | None:
        model = network()
        with (
            connect(place.home) as peer,
            peer.join("stragglers", model, strategy="gossip") as run,
            Gossip(run, every=5, wait_for=PEERS - 1) as gossip,
        ):
            all_here.wait(60.0)
            if place is places[0]:
                threading.Event().wait(
                    INITIAL_WAIT + 1.5
                )  # Its last steps take longer than a group's first wait.
        return gossip.finished

    all_here = threading.Barrier(PEERS)
    ends = together(end, places)
    assert all(one is not None and len(one.contributors) == PEERS for one in ends), ends
