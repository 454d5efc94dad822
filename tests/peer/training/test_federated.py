"""`Federated`: rounds in which the drawn peers train, and all make the same server step."""

from __future__ import annotations

import copy
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.averaging.aio.donor import TRANSFER_FRAME
from equipoise.averaging.aio.round_driver import HEADER_PREFIX_BYTES, ROUND_FRAME
from equipoise.averaging.matchmaking.topology import ranked
from equipoise.averaging.replication.messages import Answer, decode
from equipoise.averaging.state import StateId
from equipoise.peer import Refused
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.daemon.session import Session
from equipoise.peer.training import Checkpoints, Federated
from equipoise.peer.training.federated import Task, _returned
from fakes.federated import (
    CURVATURES,
    Client,
    assert_alike,
    assert_same_models,
    clients,
    federated,
    trained,
)
from fakes.hostile import Frame
from fakes.world import World
from oracles.federated import OUTER, ROUNDS, Noisy, assert_reference


class NoisyClient(Noisy, Client):
    """A peer of the oracle."""

    def __init__(self, swarm: World, index: int, **options: Any) -> None:
        Client.__init__(self, swarm, index, rounds=ROUNDS, **options)
        Noisy.__init__(self, index)


@pytest.mark.parametrize(
    ("outer", "rule"),
    [
        *((outer, "mean") for outer in OUTER),
        ("fedadam", "median"),
        ("average", "trimmed:beta=0.2"),
    ],
)
def test_five_peers_agree_on_the_values_of_the_reference(outer: str, rule: str) -> None:
    swarm = World(strategy="federated:available=5,quorum=5", rule=rule)
    peers = [NoisyClient(swarm, index, outer=outer) for index in range(5)]
    swarm.run(*peers)
    assert_alike([*peers])
    assert_reference({one.name: one for one in peers}, peers[0].history, outer, rule)


def test_all_peers_make_the_same_rounds() -> None:
    peers = trained(federated(), 3)
    assert_alike(peers)
    assert [record.number for record in peers[0].history] == [1, 2, 3]
    for peer in peers:
        assert [number for number, _ in peer.fits] == [1, 2, 3]
        assert [number for number, _ in peer.evaluations] == [0, 1, 2, 3]
        assert peer.trained.epoch == 3
        assert peer.trained.reason == "all 3 rounds are made"
    for record in peers[0].history:
        assert record.ok
        assert record.contributors == {"peer0": 10.0, "peer1": 20.0, "peer2": 30.0}
        assert set(record.drawn) == {"peer0", "peer1", "peer2"}
        assert record.metrics["number"] == record.number
        assert record.seconds >= 1.0
        assert record.bytes_sent > 0


def test_half_of_the_peers_train_and_the_others_observe() -> None:
    swarm = federated("federated:fraction=0.5")
    peers = trained(swarm, 8, rounds=6)
    assert_alike(peers)
    draws = []
    for record in peers[0].history:
        assert len(record.drawn) == 4
        assert set(record.contributors) == set(record.drawn)
        assert {peer.name for peer in peers if record.number in dict(peer.fits)} == set(record.drawn)
        draws.append(record.drawn)
    assert len(set(draws)) > 1


def test_a_question_that_nobody_answers_holds_up_no_peer_that_waits_for_a_round() -> None:
    swarm = federated("federated:grace=60")
    swarm.recover_seconds = 2.5
    peers = clients(swarm, 3, rounds=1)
    peers[2].seconds = 2.5  # The others wait since 1 s, and look around at 2 s.
    swarm.run()
    assert_alike(peers)
    for peer in peers:
        assert peer.records[0].seconds < 3.5


def test_peers_that_begin_with_other_parameters_agree_on_one_of_them() -> None:
    swarm = federated("federated:available=4")
    swarm.fetch_seconds = 0.2
    peers = clients(swarm, 4)
    for peer in peers:
        peer.model["w"] += peer.index
    swarm.run()
    assert_alike(peers)
    for peer in peers:
        assert [number for number, _ in peer.fits][-2:] == [2, 3]


def test_a_newcomer_equals_the_others() -> None:
    swarm = federated("federated:grace=1")
    peers = clients(swarm, 3, rounds=12, outer="fedadam")
    late = Client(swarm, 3, rounds=12, outer="fedadam").begin(at=4.5)
    late.model["w"] += 5
    swarm.run()
    assert_alike([*peers, late])
    assert len(late.history) == 12
    assert 6 <= len(late.fits) <= 10


def test_a_peer_without_fit_never_contributes_and_evaluates() -> None:
    swarm = federated()
    peers = clients(swarm, 4)
    peers[3].fits_at_all = False
    swarm.run()
    assert_alike(peers)
    assert all("peer3" not in record.drawn for record in peers[0].history)
    assert [number for number, _ in peers[3].evaluations] == [0, 1, 2, 3]


def test_all_stop_after_the_same_round() -> None:
    swarm = federated()
    peers = trained(swarm, 3, rounds=50, until="w > 1.5")
    assert_alike(peers)
    first = next(record.number for record in peers[0].history if record.evaluation["w"] > 1.5)
    assert len(peers[0].history) == first + 1 < 50
    assert peers[0].trained.reason.startswith(f"w > 1.5 in rounds {first} and {first + 1}: ")


def test_all_stop_when_nothing_gets_better() -> None:
    peers = trained(federated(), 3, rounds=100, until="w >= 100", patience=3)
    assert_alike(peers)
    assert len(peers[0].history) < 100
    assert peers[0].trained.reason.startswith("w has not improved for 3 rounds")


def test_a_dead_peer_is_replaced_and_the_round_comes_about() -> None:
    swarm = federated("federated:fraction=0.5,grace=30")
    peers = clients(swarm, 7, rounds=2)
    for peer in peers:
        peer.seconds = 20.0
    killed: list[str] = []

    def kill() -> None:
        swarm.compute(10.0)
        killed.extend(peer.name for peer in peers if peer.fits)
        del killed[1:]
        swarm.kill(killed[0])

    swarm.peer("fate", kill)
    swarm.run()
    left = [peer for peer in peers if peer.name not in killed]
    assert_alike(left)
    for peer in left:
        numbers = [number for number, _ in peer.fits]
        assert len(numbers) == len(set(numbers)), "nobody trains twice from one state"
    assert all(killed[0] not in record.contributors for record in left[0].history)
    assert len(left[0].history[0].contributors) == 3, "one stands in for the dead peer"


@pytest.mark.parametrize(("place", "is_in"), [(0, False), (0, True), (-1, False)])
def test_a_coordinator_or_another_that_is_killed_while_the_others_wait_costs_no_grace(
    place: int, is_in: bool
) -> None:
    swarm = federated("federated:quorum=3,grace=120,available=7")
    peers = clients(swarm, 7, rounds=2)
    # The peers meet in the round before.
    name = ranked("1", tuple(sorted(one.name for one in peers)))[place]
    victim, others = peers[int(name[-1])], [one for one in peers if one.name != name]
    victim.seconds, others[0].seconds = (1.0, 20.0) if is_in else (100.0, 1.0)

    def kill() -> None:
        swarm.compute(10.0)
        swarm.kill(name)

    swarm.peer("fate", kill)
    swarm.run()
    assert_alike(others)
    for one in others:
        assert set(one.records[0].contributors) == {each.name for each in others}
        assert one.records[0].seconds < (23.0 if is_in else 13.0)


def test_a_peer_that_stands_still_during_its_training_costs_no_more_than_the_grace_and_is_late() -> None:
    class Still(World):
        """Nothing comes from the first peer, nor gets to it, while its channels stay open."""

        still = False

        def tap(self, sender: str, receiver: str, header: bytes, body: bytes) -> list[Frame]:
            lost = self.still and "peer0" in (sender, receiver)
            return [] if lost else super().tap(sender, receiver, header, body)

    swarm = Still(strategy="federated:quorum=3,grace=4,available=5")
    victim, *others = peers = clients(swarm, 5, rounds=2)
    victim.seconds = 12.0

    def fate() -> None:
        swarm.compute(1.0)
        swarm.still = True
        for one in others:
            one.seconds = 20.0
        swarm.compute(9.0)
        swarm.still, victim.seconds = False, 1.0

    swarm.peer("fate", fate)
    swarm.run()
    assert_alike(peers)
    assert set(others[0].records[0].contributors) == {each.name for each in others}
    assert others[0].records[0].seconds < 1.0 + 4.0 + 1.0
    assert victim.records[0].late > 0
    assert set(victim.records[-1].contributors) == {one.name for one in peers}


def test_a_failed_round_keeps_the_contributions_and_is_tried_again() -> None:
    swarm = federated()
    swarm.fails = lambda number, peer: number == 3
    peers = trained(swarm, 3)
    assert_alike(peers)
    for peer in peers:
        assert [number for number, _ in peer.fits] == [1, 2, 3]


@pytest.mark.parametrize("late", ["drop", "next"])
def test_a_late_contribution_counts_never_or_once_at_its_discount(late: str) -> None:
    swarm = federated(f"federated:grace=2,late={late}")
    peers = clients(swarm, 4, rounds=3)
    slow = peers[3]
    slow.seconds = 4.5
    swarm.run()
    assert_alike(peers)
    records = slow.records
    assert records[0].ok
    assert records[0].late == pytest.approx(1.5, abs=0.3)
    assert not any(record.late for peer in peers[:3] for record in peer.records)
    assert records[0].reason.startswith("its contribution came too late by")
    given = [record.contributors.get("peer3") for record in peers[0].history]
    discounted = slow.samples / 2**0.5
    assert given[0] is None
    if late == "next":
        assert given[1] == pytest.approx(discounted)
        assert given[2:] == [None]
    else:
        assert given[1:] == [None, None]


def test_a_late_contribution_is_offered_as_soon_as_its_peer_has_the_missed_mean() -> None:
    swarm = federated("federated:grace=2,late=next")
    swarm.recover_seconds = 4.0  # Longer than a late peer waits for it at once.
    peers = clients(swarm, 4, rounds=3)
    slow = peers[3]
    slow.seconds = 4.5

    def fate() -> None:
        swarm.compute(2.0)
        for peer in peers[:3]:
            peer.seconds = 10.0

    swarm.peer("fate", fate)
    swarm.run()
    assert_alike(peers)
    given = [record.contributors.get("peer3") for record in peers[0].history]
    assert given[:2] == [None, pytest.approx(slow.samples / 2**0.5)]


def test_the_proximal_term_draws_to_the_agreed_model() -> None:
    swarm = federated()
    peers = clients(swarm, 3, rounds=25, proximal=2.0)
    for peer in peers:
        peer.steps, peer.proximal = 15, True
    swarm.run()
    moved = [a / (a + 2.0) * (1 - (1 - 0.05 * (a + 2.0)) ** 15) for a in CURVATURES]
    pulls = [(index + 1) * one for index, one in enumerate(moved)]  # By samples; the minima are 0, 1 and 2.
    expected = (pulls[1] + 2 * pulls[2]) / sum(pulls)
    assert float(peers[0].model["w"][0]) == pytest.approx(expected, abs=1e-5)


def test_an_outer_step_is_made_alike_under_a_coarse_codec() -> None:
    peers = trained(federated(codec="int8"), 3, outer="fedadam")
    assert_alike(peers)
    assert peers[0].run.terms["outer step"].startswith("fedadam")


def test_an_image_with_another_outer_state_is_refused() -> None:
    liar, peer = trained(federated(), 2, outer="fedadam")
    state = liar.trained.model.outer.tree()
    liar.trained.model.outer.load({**state, "v": {**state["v"], "w": torch.ones(7)}})
    with pytest.raises(ImageError, match=r"'w' of the outer step's 'v' has shape \[2\] here, got \[7\]"):
        peer.trained.member.read(liar.trained.member.image())


class Liar(Client):
    """It claims a model of a far later round than its history has records of."""

    def work(self) -> None:
        self.join()
        while self.trained.epoch < 2:
            self.trained.step()
        self.trained.member._start_from(StateId(30, "b" * 64))
        end = self.swarm.now + 60.0
        while self.swarm.now < end and not self.trained.ended:
            self.trained.step()


def test_a_state_of_liars_without_the_rounds_before_it_ends_no_script() -> None:
    world = federated("federated:deadline=8,grace=1")
    ours = clients(world, 3, rounds=36)
    for index in range(3, 7):
        Liar(world, index, rounds=36).begin()
    world.run()
    assert all(one.trained.ended for one in ours)
    assert any("has no record of this round" in record.reason for one in ours for record in one.records)


def test_buffers_are_averaged_and_evaluated() -> None:
    swarm = federated()
    peers = clients(swarm, 3, rounds=2)
    for peer in peers:
        peer.model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        peer.fit = _fits_batches(peer)  # type: ignore[method-assign]
        peer.evaluate = lambda task: (1.0, {"one": 1.0})  # type: ignore[method-assign]
    swarm.run()
    first, *others = [peer.model.state_dict() for peer in peers]
    for other in others:
        for name in ("0.weight", "1.weight", "1.running_mean", "1.running_var"):
            assert torch.equal(first[name], other[name])
    assert float(first["1.running_mean"].abs().max()) > 0
    assert peers[0].run.terms["buffers"] == "averaged"
    assert len({peer.image() for peer in peers}) == 1


def _fits_batches(peer: Client) -> Any:
    def fit(task: Task) -> tuple[float, dict[str, float]]:
        swarm_seed = torch.Generator().manual_seed(peer.index)
        peer.swarm.compute(1.0)
        peer.model(torch.randn(8, 2, generator=swarm_seed)).square().mean().backward()
        with torch.no_grad():
            for one in peer.model.parameters():
                one.sub_(0.1 * one.grad)
        return 8.0, {}

    return fit


def test_a_training_that_leads_to_nan_is_given_up_and_the_round_comes_about() -> None:
    swarm = federated("federated:grace=1")
    peers = clients(swarm, 3, rounds=2)

    def spoil(task: Task) -> tuple[float, dict[str, float]]:
        peers[2].fits.append((task.number, swarm.now))
        peers[2].model["w"].fill_(torch.nan)
        return 8.0, {"loss": float("nan")}

    peers[2].fit = spoil  # type: ignore[method-assign]
    swarm.run()
    assert_alike(peers)
    assert all(set(record.contributors) == {"peer0", "peer1"} for record in peers[0].history)
    assert [number for number, _ in peers[2].fits] == [1, 2]


def test_tasks_say_what_is_alike_and_how_much_time_is_left() -> None:
    swarm = federated("federated:deadline=100")
    peers = clients(swarm, 2, rounds=1, config={"lr": 0.1, "layers": (1, 2)})
    seen: list[tuple[Any, float, float]] = []

    def look(task: Task) -> tuple[float, dict[str, float]]:
        before = task.seconds_left
        swarm.compute(30.0)
        seen.append((dict(task.config), before, task.seconds_left))
        return 1.0, {}

    peers[0].fit = look  # type: ignore[method-assign]
    swarm.run()
    config, before, after = seen[0]
    assert config == {"lr": 0.1, "layers": [1, 2]}
    assert 95 < before <= 100
    assert before - after == pytest.approx(30.0)
    assert peers[0].run.terms["config lr"] == "0.1"
    assert peers[0].run.terms["config layers"] == "[1, 2]"


def test_terms_say_what_must_be_alike() -> None:
    swarm = federated()
    peer = Client(swarm, 0, until="w > 3", patience=2, outer="fedyogi", proximal=0.5)
    peer.join()
    assert dict(peer.run.terms) == {
        "training": "Federated",
        "outer step": "fedyogi:eta=0.01,beta1=0.9,beta2=0.99,tau=0.001",
        "rounds": "3",
        "until": "w > 3.0",
        "patience": "2",
        "proximal": "0.5",
        "buffers": "none",
        "extra state": "none",
    }
    many = Client(federated(), 0, config={f"name{at}": at for at in range(40)})
    many.join()
    assert " blake3 " in many.run.terms["config"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rounds": 0}, "rounds: expected a whole number of rounds >= 1, or None, got 0"),
        ({"patience": -1}, "patience: expected a whole number of rounds >= 0, below 1000, got -1"),
        (
            {"patience": 1000, "until": "w > 1"},
            "patience: expected a whole number of rounds >= 0, below 1000",
        ),
        ({"patience": 1}, "patience: expected 0 without `until`, got 1"),
        ({"until": "better"}, "until: expected NAME >= NUMBER"),
        ({"proximal": -0.1}, "proximal: expected a finite number >= 0, got -0.1"),
        ({"config": {"a": object()}}, "config: expected values that JSON can hold, by name"),
        ({"config": {"a": float("nan")}}, "config: expected values that JSON can hold, by name"),
        ({"outer": "fedsomething"}, "fedsomething"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Client(federated(), 0, **options).join()


def test_the_best_checkpoint_has_the_direction_of_the_condition_on_its_metric(tmp_path: Path) -> None:
    highest = Checkpoints(directory=tmp_path, best="loss")
    with pytest.raises(ValueError, match=r"checkpoints: expected mode='min', as until='loss <= 0.1' asks"):
        Client(federated(), 0, until="loss <= 0.1", checkpoints=highest).join()
    lowest = Checkpoints(directory=tmp_path, best="loss", mode="min")
    for until, kept in (("loss <= 0.1", lowest), ("w >= 1", lowest), ("w >= 1", highest)):
        peer = Client(federated(), 0, until=until, checkpoints=kept)
        peer.join()
        peer.run.leave()


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="unknown option 'round'; did you mean 'rounds'"):
        Client(federated(), 0, round=3).join()


def test_the_strategy_must_be_federated_and_the_run_unused() -> None:
    with pytest.raises(Refused, match="expected a run with the strategy federated, 'digits' has 'allreduce"):
        Client(federated("allreduce"), 0).join()
    peer = Client(federated(), 0)
    peer.join()
    with pytest.raises(Refused, match="run 'digits' is stepped by Federated already"):
        Federated(peer.run, peer.fit)


def test_a_round_waits_until_enough_peers_are_there() -> None:
    swarm = federated("federated:available=3")
    swarm.fetch_seconds = 0.2
    peers = clients(swarm, 2, rounds=1)
    peers.append(Client(swarm, 2, rounds=1).begin(at=20.0))
    swarm.run()
    assert_alike(peers)
    assert all(peer.fits[0][1] >= 20.0 for peer in peers)
    assert set(peers[0].history[0].contributors) == {"peer0", "peer1", "peer2"}


def test_a_round_without_a_quorum_fails_at_its_deadline_and_keeps_the_contributions() -> None:
    swarm = federated("federated:quorum=3,deadline=60")
    peers = clients(swarm, 2, rounds=1)
    peers.append(Client(swarm, 2, rounds=1).begin(at=100.0))
    swarm.run()
    assert_alike(peers)
    failed, made = peers[0].records
    assert not failed.ok
    assert (failed.number, made.number) == (1, 1)
    assert failed.reason.startswith("no round within 60 s: ")
    assert set(made.contributors) == {"peer0", "peer1", "peer2"}
    assert [len(peer.fits) for peer in peers] == [1, 1, 1]


def test_a_training_longer_than_the_deadline_still_counts() -> None:
    swarm = federated("federated:grace=5,deadline=10")
    peers = clients(swarm, 2, rounds=1)
    peers[0].seconds, peers[1].seconds = 15.0, 18.0
    swarm.run()
    assert_alike(peers)
    assert [one.records[0].ok for one in peers] == [True, True]
    assert len(peers[0].history[0].contributors) == 2


@pytest.mark.parametrize("late", ["drop", "next"])
def test_a_training_without_weight_ends_with_its_round(late: str) -> None:
    swarm = federated(f"federated:available=3,late={late}")
    peers = clients(swarm, 3)
    peers[2].samples = 0.0
    swarm.run()
    assert_alike(peers)
    assert [number for number, _ in peers[2].fits] == [1, 2, 3]


@pytest.mark.parametrize("longest", ["deadline", "grace"])
def test_a_round_may_take_a_day(longest: str) -> None:
    assert_alike(trained(federated(f"federated:{longest}=86400"), 2, rounds=1))


def test_all_are_killed_in_a_training_and_end_as_a_run_that_was_never_killed(tmp_path: Path) -> None:
    def begin(swarm: World, folder: Path) -> list[Client]:
        peers = []
        for index in range(3):
            kept = Checkpoints(every=1, directory=folder / str(index), resume=True, best="w")
            peers.append(Client(swarm, index, checkpoints=kept, rounds=10, outer="fedadam").begin())
        return peers

    all_there = "federated:available=3,quorum=3"
    whole = trained(federated(all_there), 3, rounds=10, outer="fedadam")
    doomed = federated(all_there)
    victims = begin(doomed, tmp_path / "before")

    def fate() -> None:
        while not all(peer.fits and peer.fits[-1][0] == 8 for peer in victims):
            doomed.compute(0.1)
        for thread in threading.enumerate():
            if thread.name.endswith("checkpoint"):
                thread.join()  # Virtual time does not wait for a disk.
        for peer in victims:
            doomed.kill(peer.name)

    doomed.peer("fate", fate)
    doomed.run()
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    swarm = federated(all_there)
    resumed = begin(swarm, tmp_path / "after")
    swarm.run()
    for peer in resumed:
        peer.run.leave()  # Waits for what is being written.
    assert_alike(resumed)
    assert_same_models([*resumed, *whole])
    assert [number for number, _ in resumed[0].fits] == [8, 9, 10]
    assert [one.metrics for one in resumed[0].history] == [one.metrics for one in whole[0].history]
    assert (tmp_path / "after" / "0" / "digits" / "best").is_dir()


def test_a_training_that_has_ended_goes_on_from_its_checkpoint_with_other_ends(tmp_path: Path) -> None:
    def end(**ends: Any) -> list[Client]:
        swarm = federated("federated:available=3")
        peers = []
        for index in range(3):
            kept = Checkpoints(every=1, directory=tmp_path / str(index), resume=True)
            peers.append(Client(swarm, index, checkpoints=kept, **ends).begin())
        swarm.run()
        for peer in peers:
            peer.run.leave()
        return peers

    assert [peer.trained.epoch for peer in end(rounds=2)] == [2, 2, 2]
    longer = end(rounds=4, until="w > 100", patience=50)
    assert_alike(longer)
    assert_same_models([*longer, *trained(federated("federated:available=3"), 3, rounds=4)])
    assert [number for number, _ in longer[0].fits] == [3, 4]


def test_a_late_training_that_has_counted_is_no_more_to_count_though_a_snapshot_brought_its_mean() -> None:
    class Deaf(World):
        """The last peer gets no mean of one round, to which it contributes, and nobody offers it a mean later."""

        def tap(self, sender: str, receiver: str, header: bytes, body: bytes) -> list[Frame]:
            found = super().tap(sender, receiver, header, body)
            fourth = self.rounds[4:5] == [header[1:HEADER_PREFIX_BYTES]]  # After the first meeting.
            unheard = header[:1] == ROUND_FRAME and fourth and b"Mean" in header
            if receiver == "peer2" and header[:1] == TRANSFER_FRAME and b"Answer" in header:
                answer = decode(header[1:])
                unheard = isinstance(answer, Answer) and bool(answer.age)
            return [] if unheard and receiver == "peer2" else found

    swarm = Deaf(strategy="federated:grace=1,quorum=2,late=next,available=3")
    peers = trained(swarm, 3, rounds=15)
    weights = [record.contributors.get("peer2", 30.0) for record in peers[0].history]
    assert weights == [30.0] * 15
    assert peers[2].records[3].reason.startswith("1 of 3 members left")
    counted = sum("peer2" in record.contributors for record in peers[0].history)
    # It was not heard for so long that it has lost its place, and its last training comes too late for the others.
    assert counted <= len(peers[2].fits) <= counted + 1 < 15


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ((1.0, 2.0, {}), "fit: expected (weight, {name: number}) to be returned, got (1.0, 2.0, {})"),
        ((-1.0, {}), "fit: expected the weight of metrics as a number of 0"),
        ((1.0, {"": 1.0}), "fit: expected a metric's name of 1 to 24 characters"),
        ((1.0, {"loss": "low"}), "fit: expected metric 'loss' as a finite number, got 'low'"),
        ((1.0, {"loss": torch.zeros(2)}), "fit: expected metric 'loss' as a finite number, got tensor"),
        ((1.0, {"loss": 10**400}), "fit: expected metric 'loss' as a finite number, got 1000"),
        ((True, {}), "fit: expected the weight of metrics as a number of 0 to 1e+12, got True"),
        (("3", {}), "fit: expected the weight of metrics as a number of 0 to 1e+12, got '3'"),
        ((None, {}), "fit: expected the weight of metrics as a number of 0 to 1e+12, got None"),
    ],
)
def test_what_fit_must_return(returned: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(told)):
        _returned("fit", returned)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    given = np.int64(3), {"loss": torch.tensor(0.5), "accuracy": np.float32(0.25), "nan": float("nan")}
    assert _returned("fit", given) == (3.0, {"accuracy": 0.25, "loss": 0.5})


def test_a_peer_that_was_late_for_a_round_that_failed_offers_its_contribution_again() -> None:
    swarm = federated("federated:deadline=600,grace=0,available=3")
    swarm.net.latency = 0.05
    peers = clients(swarm, 3, rounds=1)
    peers[2].seconds = 2.0

    def fate() -> None:
        while len(swarm.rounds) < 2:
            swarm.compute(0.01)
        swarm.kill("peer1")  # So the other member of its round has no majority.

    swarm.peer("fate", fate)
    swarm.run()
    del peers[1]
    assert_alike(peers)
    assert [peer.records[-1].late > 0 for peer in peers] == [False, True]
    for peer in peers:
        assert peer.records[-1].ok
        assert peer.records[-1].seconds < 60
        assert len(peer.fits) == 1
    assert len(peers[0].history[0].contributors) == 2


@pytest.mark.parametrize(
    ("spoils", "why"),
    [
        (lambda peer: 0.0, "this peer's `fit` returned the weight 0"),
        (
            lambda peer: peer.model["w"].fill_(torch.nan).numel(),
            "this peer's training has led nowhere: gradient 'w' holds nan",
        ),
    ],
    ids=["weight 0", "NaN"],
)
def test_peers_whose_trainings_all_counted_nothing_train_again(spoils: Any, why: str) -> None:
    swarm = federated("federated:deadline=20")
    peers = clients(swarm, 2, rounds=2)
    models: list[float] = []
    for peer in peers:
        fit = peer.fit

        def first(task: Task, peer: Client = peer, fit: Any = fit) -> tuple[float, dict[str, float]]:
            if not peer.fits:
                peer.fits.append((task.number, swarm.now))
                with torch.no_grad():
                    for one in peer.model.values():
                        one.add_(1.0)
                    return float(spoils(peer)), {}
            models.append(float(peer.model["w"].sum()))
            return fit(task)

        peer.fit = first  # type: ignore[method-assign]
    swarm.run()
    assert_alike(peers)
    assert models[:2] == [0.0, 0.0], "they train again from the model as it was"
    for peer in peers:
        failed, *made = peer.records
        assert failed.reason.startswith(f"no round within 20 s: {why}")
        assert [record.ok for record in made] == [True, True]
        assert [number for number, _ in peer.fits] == [1, 1, 2]


def test_a_peer_that_all_others_have_left_ends_with_the_agreed_model_and_says_what_did_not_count() -> None:
    swarm = federated("federated:deadline=20")
    peers = clients(swarm, 2, rounds=None)
    for peer in peers:
        peer.model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        peer.fit = _fits_batches(peer)  # type: ignore[method-assign]
        peer.evaluate = lambda task: (1.0, {"one": 1.0})  # type: ignore[method-assign]
    peers[1].stops_after = 2
    swarm.run()
    assert [peer.trained.epoch for peer in peers] == [2, 2]
    first, second = (peer.model.state_dict() for peer in peers)
    for name in ("0.weight", "1.weight", "1.running_mean", "1.running_var"):
        assert torch.equal(first[name], second[name])
    stays, leaves = (peer.trained.finished for peer in peers)
    assert stays is not None
    assert stays.in_step
    assert stays.reason.endswith("; 8 samples that no round counted")
    assert leaves is not None
    assert "samples" not in leaves.reason


def test_places_are_told_only_while_more_peers_live_than_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    tell = Session.tell

    def told_of(session: Session, topic: str, line: str) -> None:
        told.extend([line] if topic == "places" else [])
        tell(session, topic, line)

    monkeypatch.setattr(Session, "tell", told_of)
    swarm = World(strategy="federated:available=5", group_size=4)
    peers = clients(swarm, 5)
    peers[4].stops_after = 1
    swarm.run()
    assert "5 peers share 4 places: each round draws anew, and the others follow" in told
    assert told[-4:] == [""] * 4  # Once at each peer.
    assert told.count("") == 4


def test_a_training_that_raises_leaves_the_model_as_it_was_and_may_be_tried_again() -> None:
    swarm = federated()
    peers = [Client(swarm, index, rounds=2) for index in range(2)]
    peer = peers[0]
    peer.model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    peers[1].model = copy.deepcopy(peer.model)
    for one in peers:
        one.fit = _fits_batches(one)  # type: ignore[method-assign]
        one.evaluate = lambda task: (1.0, {})  # type: ignore[method-assign]
    fit, seen = peer.fit, list[Any]()

    def raises(task: Task) -> tuple[float, dict[str, float]]:
        fit(task)
        raise OSError("no data")

    def work() -> None:
        peer.fit = raises  # type: ignore[method-assign]
        peer.join()
        before = copy.deepcopy(peer.model.state_dict())
        with pytest.raises(OSError, match="no data"):
            peer.trained.run()
        seen.append(
            [name for name, one in peer.model.state_dict().items() if not torch.equal(one, before[name])]
        )
        peer.trained._fit = fit
        peer.trained.run()

    peer.work = work  # type: ignore[method-assign]
    swarm.run(*peers)
    assert seen == [["1.num_batches_tracked"]]
    assert peers[0].image() == peers[1].image()
    assert peer.trained.epoch == 2
