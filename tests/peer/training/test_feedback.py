"""Error feedback of local steps: what codecs leave out is sent later, and counts once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.averaging.aio.round_driver import ROUND_FRAME
from equipoise.averaging.outcome import Outcome
from equipoise.compression import parse_codec
from equipoise.peer import Refused
from equipoise.peer.client.safetensors_io import ImageError, pack
from equipoise.peer.control.messages import Fetch
from equipoise.peer.training import Checkpoints, DiLoCo, Gossip, SparseLoCo, member
from equipoise.peer.training.checkpoint_files import RESIDUAL_FILE
from equipoise.peer.training.feedback import Feedback, read_residual
from equipoise.peer.training.image import digest
from fakes.trainers import adamw
from fakes.world import World

PEERS, EVERY, SIZE = 3, 3, 700


class Linear:
    """One peer whose loss is linear: a step moves the parameters by what they do not depend on."""

    def __init__(self, world: World, index: int, exchanges: int, size: int = SIZE, **options: Any) -> None:
        self.world, self.index, self.steps, self.options = world, index, exchanges * EVERY, options
        self.away = 0
        self.parameter = torch.nn.Parameter(torch.linspace(-1, 1, size))
        self.start = self.parameter.detach().clone()
        self.moved: dict[int, torch.Tensor] = {}
        self.residuals: list[tuple[int, str]] = []
        self.at: dict[int, torch.Tensor] = {}
        self.states: dict[int, torch.Tensor] = {}
        self.trained: SparseLoCo

    def begin(self, at: float = 0.0) -> Linear:
        self.world.peer(f"peer{self.index}", self.train, at)
        return self

    def train(self) -> None:
        run = self.world.join(f"peer{self.index}", "text", {"w": self.parameter})
        self.trained = SparseLoCo(run, EVERY, **{"beta": 1.0, **self.options})
        (fragment,) = self.trained._fragments
        feedback = fragment.feedback
        assert feedback is not None
        add = feedback.add

        def noted(differences: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            self.moved[fragment.member.id.epoch] = differences["w"].clone()
            return add(differences)

        feedback.add = noted  # type: ignore[method-assign]
        optimizer = torch.optim.SGD([self.parameter], lr=0.01)
        with self.trained:
            for step in range(self.steps):
                self.world.compute(0.5)
                if step == 4 * EVERY:
                    self.world.compute(0.5 * EVERY * self.away)
                drawn = torch.Generator().manual_seed(1000 * self.index + step)
                self.parameter.grad = torch.randn(self.parameter.numel(), generator=drawn)
                optimizer.step()
                self.residuals.append((fragment.member.id.epoch, digest(self.trained.residual)))
                self.at[fragment.member.id.epoch] = self.trained.residual["w"]
                self.states[fragment.member.id.epoch] = self.agreed.clone()
                if self.away and fragment.member.id.epoch * EVERY >= self.steps:
                    break
        self.at[fragment.member.id.epoch] = self.trained.residual["w"]
        run.leave()

    def taken_off(self, epoch: int) -> torch.Tensor:
        """What was taken off the residual when the mean after this epoch came."""
        if epoch not in self.at:
            return torch.zeros(SIZE)
        after = min(one for one in self.at if one > epoch)
        return self.at[epoch] + self.moved.get(epoch, 0) - self.at[after]

    @property
    def agreed(self) -> torch.Tensor:
        return self.trained._fragments[0].model.values["w"]


def assert_all_counts_once(peers: list[Linear]) -> None:
    """agreed - start = -(sum of Delta - sum of residuals) / n."""
    moved = sum(sum(one.moved.values()) - one.trained.residual["w"] for one in peers)
    torch.testing.assert_close(peers[0].agreed - peers[0].start, -moved / len(peers), atol=1e-5, rtol=0)
    assert all(torch.equal(one.agreed, peers[0].agreed) for one in peers)


@pytest.mark.parametrize("codec", ["sparse:group=64", "sparse:group=32"])
def test_the_agreed_parameters_have_all_that_is_in_no_residual(codec: str) -> None:
    world = World(codec)
    peers = [Linear(world, index, 50, wait_for=PEERS - 1).begin() for index in range(PEERS)]
    world.run()
    assert peers[0].trained.epoch == 50
    assert_all_counts_once(peers)
    assert all(one.trained.residual["w"].norm() > 0.01 for one in peers)


def test_a_round_that_fails_leaves_the_residual_as_it_was() -> None:
    world = World("sparse")
    world.fails = lambda number, peer: number in (4, 5)
    peers = [Linear(world, index, 8, wait_for=PEERS - 1).begin() for index in range(PEERS)]
    world.run()
    for one in peers:
        epochs = [epoch for epoch, _ in one.residuals]
        assert len(set(one.residuals)) == len(set(epochs)) == epochs[-1] + 1, "one residual an epoch"
    assert_all_counts_once(peers)


@pytest.mark.parametrize("heard", [0, 1, 2, 4])
def test_a_contribution_to_a_round_that_failed_here_is_taken_off_once(heard: int) -> None:
    world = World("sparse")
    world.hear_of_round("peer2", 4, heard)
    peers = [Linear(world, index, 8, wait_for=PEERS - 1).begin() for index in range(PEERS)]
    world.run()
    assert ("peer2", 2) in {(peer, state.epoch) for peer, state in world.recovered}
    rounds = {one.state.epoch: one.givers for _, _, one in world.outcomes if one.ok and one.state}
    assert ("peer2" in rounds[2]) == (heard > 1)
    moved = torch.zeros(SIZE)
    for epoch, givers in rounds.items():
        for one in peers:
            if f"peer{one.index}" in givers:
                moved += one.taken_off(epoch) / len(givers)
            else:
                assert one.taken_off(epoch).abs().max() < 1e-6, "it is in the residual"
    torch.testing.assert_close(peers[0].agreed - peers[0].start, -moved, atol=1e-5, rtol=0)


@pytest.mark.parametrize("heard", [2, 4])
@pytest.mark.parametrize(("codec", "error"), [("sparse", 1e-5), ("nf4", 0.15)])
def test_a_mean_is_exact_over_its_contributors_where_an_owner_is_killed(
    codec: str, error: float, heard: int
) -> None:
    """A peer is killed when it has heard so many frames of the fourth round; errors are shares of the mean's norm."""
    world = World(codec)
    peers = [Linear(world, index, 6, wait_for=PEERS) for index in range(PEERS + 1)]
    tap, left = world.tap, [heard]

    def counted(sender: str, receiver: str, header: bytes, body: bytes) -> Any:
        if receiver == "peer3" and header[:1] == ROUND_FRAME and len(world.rounds) == 4:
            left[0] -= 1
            if left[0] == 0:
                world.loop.call_soon(world.kill, "peer3")
        return tap(sender, receiver, header, body)

    world.tap = counted  # type: ignore[method-assign]
    world.run(*peers)
    living = peers[:PEERS]
    assert left[0] <= 0
    assert all(torch.equal(one.agreed, living[0].agreed) for one in living)
    givers = next(one.givers for _, _, one in world.outcomes if one.ok and one.state and one.state.epoch == 2)
    moved = {one: one.at[2] + one.moved[2] for one in peers if f"peer{one.index}" in givers}
    coded, sent = parse_codec(codec), torch.zeros(SIZE)
    for values in moved.values():
        payload, out = bytearray(coded.encoded_size(SIZE)), torch.empty(SIZE)
        coded.encode(values, payload)
        coded.decode(payload, out)
        sent += out / len(moved)
    assert len(moved) >= PEERS - 1
    mean = living[0].states[2] - living[0].states[3]
    assert (mean - sent).norm() <= error * sent.norm()


class Run:
    """What error feedback asks of a run whose codec halves what it sends."""

    peer = "me"

    def __init__(self) -> None:
        self.core = self.loop = self.binding = self
        self.feedback = Feedback(self, 1.0, {"w": torch.zeros(1)})  # type: ignore[arg-type]

    def decoded(self, payload: memoryview, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor([float(bytes(payload))])}

    def send(self, difference: float, ends: Outcome | None = None) -> None:
        values = self.feedback.add({"w": torch.tensor([difference])})["w"]
        self.feedback.sends(1.0, memoryview(str(values.item() / 2).encode()))
        if ends is not None:
            self.feedback.ended(ends)

    @property
    def residual(self) -> float:
        return self.feedback.residual["w"].item()


FAILED = Outcome(ok=False, reason="", round=4, group=("me", "you"))
COUNTED = Outcome(ok=True, reason="", round=4, group=FAILED.group, contributors={"me": 1.0, "you": 1.0})
PASSED_OVER = Outcome(ok=True, reason="", round=4, group=FAILED.group, contributors={"you": 1.0})


def test_what_was_sent_is_taken_off_only_if_it_counted_or_that_cannot_be_known() -> None:
    run = Run()
    run.send(8.0, COUNTED)
    run.feedback.applied(COUNTED)
    assert run.residual == 4
    run.send(8.0, PASSED_OVER)
    run.feedback.applied(PASSED_OVER)
    assert run.residual == 12
    run.send(4.0, FAILED)
    assert run.residual == 12
    run.send(
        8.0
    )  # The next attempt, with what was moved by since, is on its way when the mean of round 4 comes.
    run.feedback.applied(COUNTED)
    assert run.residual == 20 - 10
    run.send(2.0, FAILED)
    run.feedback.replaced()
    run.feedback.replaced()
    assert run.residual == 6
    run.send(2.0, Outcome(ok=False, reason="no group formed"))
    run.feedback.replaced()
    assert run.residual == 8


def test_what_came_too_late_stays_in_the_residual_and_is_offered_again() -> None:
    run = Run()
    run.send(8.0, Outcome(ok=False, reason="", late=3.0))
    run.feedback.applied(PASSED_OVER)
    assert run.residual == 8
    assert run.feedback.again()["w"].item() == 8
    run.feedback.sends(1.0, memoryview(b"5"))
    run.feedback.ended(COUNTED)
    run.feedback.applied(COUNTED)
    assert run.residual == 3


def test_a_peer_that_was_away_for_twenty_exchanges_fetches_their_means_which_are_smaller_than_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member, "SMALL_BYTES", 0)
    size = 7000
    world = World("sparse")
    peers = [Linear(world, index, 30, size=size, wait_for=PEERS - 1) for index in range(PEERS)]
    peers[2].away = 20
    world.run(*peers)
    assert all(torch.equal(one.agreed, peers[0].agreed) for one in peers)
    fetched = [
        (one.wish.after, got) for _, peer, one, got in world.log if isinstance(one, Fetch) and peer == "peer2"
    ]
    got = [one for _, one in fetched if one and one.ok]
    assert len(got) >= 19
    assert all(after is not None for after, _ in fetched), "no snapshot"
    assert sum(one.size for one in got) <= 21 * (2 * size * 10 / 512 + 4096)


def test_the_residual_lies_in_this_peers_own_checkpoints_alone(tmp_path: Path) -> None:
    def train(exchanges: int) -> list[Linear]:
        world = World("sparse")
        peers = [
            Linear(
                world,
                index,
                exchanges,
                wait_for=PEERS - 1,
                checkpoints=Checkpoints(every=4, directory=tmp_path / str(index), resume=True),
            ).begin()
            for index in range(PEERS)
        ]
        world.run()
        return peers

    first = train(6)
    again = train(0)
    assert [digest(one.trained.residual) for one in again] == [digest(one.trained.residual) for one in first]
    (other,) = (tmp_path / "1" / "text").glob("epoch-*6-*/" + RESIDUAL_FILE)
    (own,) = (tmp_path / "0" / "text").glob("epoch-*4-*/" + RESIDUAL_FILE)
    own.replace(other)
    assert [one.trained.residual["w"].norm() > 0 for one in train(0)] == [True, False, True]


def test_a_newcomers_residual_is_zero() -> None:
    world = World("sparse")
    peers = [Linear(world, index, 12).begin() for index in range(2)]
    late = Linear(world, 2, 12).begin(8.0)
    world.run()
    zero = digest({"w": torch.zeros(SIZE)})
    came = next(at for at, (epoch, _) in enumerate(late.residuals) if epoch > 2)
    assert {residual for _, residual in late.residuals[: came + 1]} == {zero}
    assert late.residuals[-1][1] != zero
    assert torch.equal(late.agreed, peers[0].agreed)


def test_what_loses_most_values_is_refused_without_feedback() -> None:
    def work(peer: int) -> None:
        parameter = torch.nn.Parameter(torch.zeros(SIZE))
        run = world.join(f"peer{peer}", "text", {"w": parameter})
        for call in (
            run.average,
            lambda: run.shift(),
            lambda: run.optimizer(adamw([parameter]), target_batch_size=8),
            lambda: DiLoCo(run, EVERY),
            lambda: Gossip(run, EVERY),
        ):
            with pytest.raises(Refused) as refused:
                call()
            assert "codec sparse:group=64" in str(refused.value)
            assert "SparseLoCo(run, every) or DiLoCo(run, every, feedback=0.95)" in str(refused.value)
        assert isinstance(DiLoCo(run, EVERY, feedback=0.95).residual["w"], torch.Tensor)
        run.leave()

    world = World("sparse")
    world.each(1, work)


@pytest.mark.parametrize("state", ["", "[", '{"epoch":' + "[" * 100_000, '{"epoch":1}'])
def test_a_residual_without_the_id_of_a_state_is_damaged(state: str) -> None:
    with pytest.raises(ImageError, match="expected the id of its state"):
        read_residual(pack({"w": torch.zeros(3)}, {"state": state}))
