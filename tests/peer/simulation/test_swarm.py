"""Simulated peers average, step and train locally by the program's own code, and end alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equipoise.averaging.outcome import Gathering, Outcome
from equipoise.averaging.rules import Reduced, Rule, RuleError
from equipoise.averaging.spec import RunSpec
from equipoise.peer import Refused
from equipoise.peer.simulation import SimulatedPeer, simulate
from equipoise.peer.training import DiLoCo

GROUP = 64


def test_the_mean_is_exact_and_all_peers_get_the_same_bytes() -> None:
    def work(peer: SimulatedPeer, index: int) -> tuple[Outcome, torch.Tensor]:
        tensor = torch.linspace(index, index + 1, 1000)
        run = peer.join("mean", {"w": tensor}, codec="fp32", weights="any")
        peer.compute(index / 10)
        return run.average(weight=1 + index), tensor

    ended = [one for one in simulate(work, 5) if one is not None]
    tensors = [tensor for _, tensor in ended]
    expected = sum((1 + i) * torch.linspace(i, i + 1, 1000).double() for i in range(5)) / 15
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    torch.testing.assert_close(tensors[0].double(), expected, rtol=2e-7, atol=0)
    assert {outcome.digest for outcome, _ in ended} == {ended[0][0].digest}
    assert [outcome.ok for outcome, _ in ended] == [True] * 5
    assert list(ended[0][0].contributors.values()) == [1, 2, 3, 4, 5]
    assert ended[0][0].seconds["matchmaking"] == pytest.approx(0.42)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rule": "median"}, 2.5),
        ({"rule": "trimmed:beta=0.34"}, 2.5),
        ({"rule": "mean", "norms": "any"}, 26.5),
        ({"rule": "mean"}, 6.5),  # The last counts as 20: ten times the lower median.
    ],
)
def test_the_rule_and_the_cap_are_the_runs(options: dict[str, str], expected: float) -> None:
    def work(peer: SimulatedPeer, index: int) -> float:
        tensor = torch.full((300,), [1.0, 2.0, 3.0, 100.0][index])
        assert peer.join("rule", [tensor], **options).average().ok
        return float(tensor.mean())

    assert simulate(work, 4, codec="fp32") == pytest.approx([expected] * 4)


class Fails(Rule):
    """A rule of somebody's own, with a fault."""

    name = spec = "fails"

    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        raise RuleError("it cannot")


def test_a_rule_that_fails_fails_the_round_with_its_reason_and_leaves_the_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RunSpec, "rule", Fails())

    def work(peer: SimulatedPeer, index: int) -> tuple[bool, str, float]:
        tensor = torch.full((300,), float(index))
        outcome = peer.join("rule", [tensor]).average()
        return outcome.ok, outcome.reason, float(tensor.mean())

    assert simulate(work, 2) == [(False, "it cannot", 0.0), (False, "it cannot", 1.0)]


def test_a_coarse_codec_leaves_its_trace() -> None:
    def work(peer: SimulatedPeer, index: int) -> torch.Tensor:
        tensor = torch.linspace(-1, 1, 1024) * (index + 1)
        peer.join("coarse", [tensor]).average()
        return tensor

    exact, coarse = (simulate(work, 2, codec=codec)[0] for codec in ("fp32", "int8"))
    assert exact is not None
    assert coarse is not None
    assert 0 < float((exact - coarse).abs().max()) < 3 / 127


def test_gradients_are_averaged_by_weight_and_metrics_with_them() -> None:
    def work(peer: SimulatedPeer, index: int) -> tuple[Outcome, float]:
        model = torch.nn.Linear(4, 1)
        run = peer.join("step", model, codec="fp32")
        run.agree({"what": "a test"})
        run.accumulate({"weight": torch.full((1, 4), float(index)), "bias": None}, weight=1 + index)
        outcome = run.step(metrics={"loss": float(index)}, evaluation=(2.0, {"accuracy": index / 2}))
        return outcome, float(run.mean["weight"].mean())

    for outcome, mean in [one for one in simulate(work, 3) if one is not None]:
        assert outcome.ok
        assert mean == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)
        assert outcome.metrics == {"loss": pytest.approx(8 / 6)}
        assert outcome.evaluation == {"accuracy": 0.5}


def test_peers_of_other_terms_are_told_the_difference() -> None:
    def work(peer: SimulatedPeer, index: int) -> str:
        run = peer.join("terms", torch.nn.Linear(2, 2))
        peer.compute(float(index))
        try:
            run.agree({"batch": "64" if index < 2 else "32"})
        except Refused as error:
            run.agree({"batch": "64"})  # What was refused left nothing behind.
            return str(error)
        peer.compute(5.0)
        return ""

    assert simulate(work, 3) == [
        "",
        "",
        "run 'terms': batch: here 32, there 64; give the same, or use another name",
    ]


def test_a_killed_peer_is_waited_for_no_more() -> None:
    def work(peer: SimulatedPeer, index: int) -> list[int]:
        run = peer.join("kill", [torch.zeros(10)])
        members = []
        for _ in range(4):
            peer.compute(1.0)
            members.append(len(run.average().group))
        return members

    assert simulate(work, 4, kill={2: 2.5}) == [[4, 4, 3, 3], [4, 4, 3, 3], None, [4, 4, 3, 3]]


def test_a_search_can_be_stopped_and_its_state_told() -> None:
    def work(peer: SimulatedPeer, index: int) -> Any:
        run = peer.join("stop", [torch.zeros(10)])
        if index:
            peer.compute(10.0)
            return None
        pending = run.average(wait=False)
        pending.wait(1.0)
        state = run.state
        pending.stop_search("enough")
        return state, pending.result()

    state, outcome = simulate(work, 2)[0]
    assert isinstance(state, Gathering)
    assert (state.ready, state.target) == (1, 2)
    assert (outcome.ok, outcome.reason) == (False, "enough")


def test_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a strategy whose groups can be simulated, got 'gossip"):
        simulate(lambda peer, index: peer.join("pairs", [torch.zeros(3)], strategy="gossip"), 2)


def trains(peer: SimulatedPeer, index: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    torch.manual_seed(100 + index)
    run = peer.join("local", model, group_size=GROUP)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with run, DiLoCo(run, every=4) as training:
        for step in range(24):
            if index == 2 and step == 9:
                peer.compute(20.0)  # It misses rounds.
            inputs = torch.randn(8, 8)
            inner.zero_grad()
            (model(inputs) - inputs[:, :4]).square().mean().backward()
            peer.compute(0.1)
            inner.step()
    return training.member.id, training.in_step, model.weight.detach().clone()


def test_local_training_ends_alike_and_is_the_same_with_the_same_seed() -> None:
    first, again, other = (simulate(trains, 4, seed=seed, kill={3: 1.3}) for seed in (0, 0, 1))
    ends: list[Any] = [one for one in first if one is not None]
    assert first[3] is None
    assert len(ends) == 3
    assert len({state for state, _, _ in ends}) == 1
    assert all(in_step and torch.equal(weight, ends[0][2]) for _, in_step, weight in ends)
    assert [one and one[0] for one in again] == [one and one[0] for one in first]
    assert [one and one[0] for one in other] != [one and one[0] for one in first]


def test_a_newcomer_gets_the_state() -> None:
    def work(peer: SimulatedPeer, index: int) -> Any:
        torch.manual_seed(index)
        if index == 3:
            peer.compute(3.0)
        model = torch.nn.Linear(8, 4)
        run = peer.join("newcomer", model)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        with run, DiLoCo(run, every=2, alone="wait") as training:
            while training.epoch < 20:
                inner.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                peer.compute(0.2)
                inner.step()
        return training.member.id, model.weight.detach().clone()

    ends = [one for one in simulate(work, 4) if one is not None]
    assert len({state for state, _ in ends}) == 1
    assert all(torch.equal(weight, ends[0][1]) for _, weight in ends)


def test_more_peers_than_one_group_holds_are_refused_unless_the_run_is_federated() -> None:
    def work(peer: SimulatedPeer, index: int) -> str:
        try:
            peer.join("many", [torch.zeros(3)], group_size=2)
        except Refused as error:
            return str(error)
        peer.compute(1.0)
        return ""

    told = "expected at most group_size=2 simulated peers in run 'many', all in one group"
    hint = "give a group_size of up to 64, or a federated strategy"
    assert simulate(work, 3) == ["", "", f"{told}; {hint}"]
