"""What chaos runs hold rounds to: broken promises must be found. `test_chaos.py` calls no kept one broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from e2e.chaos.judge import Judge
from e2e.chaos.member import Call
from e2e.chaos.truth import Contribution, Truth
from equipoise.averaging.outcome import Outcome

VALUES = 1_200_000
"""More than a tile."""

MEMBERS = ("peer0", "peer1", "peer2")

Break = Callable[[torch.Tensor], object]


def mean(truth: Truth, members: tuple[int, ...] = (0, 1, 2), round: int = 7) -> torch.Tensor:
    """The float32 mean over members whose weights are 1, 2 and 3."""
    total, weights = torch.zeros(VALUES), 0.0
    for member in members:
        tensor = torch.empty(VALUES)
        truth.fill(tensor, member, round)
        total += tensor * (member + 1.0)
        weights += member + 1.0
    return total / weights


def ended(member: int, outcome: Outcome, took: float = 1.0, print: str = "same", round: int = 7) -> Call:
    call = Call(Contribution(member, round, member + 1.0), timeout=5.0, began=100.0, ended=100.0 + took)
    call.outcome, call.print = outcome, print
    return call


def ok(digest: str = "d", members: tuple[int, ...] = (0, 1, 2), round: int = 7) -> Outcome:
    contributors = {MEMBERS[member]: member + 1.0 for member in members}
    return Outcome(
        ok=True, reason="mean", round=round, group=MEMBERS, contributors=contributors, digest=digest
    )


@pytest.fixture
def truth() -> Truth:
    return Truth(1, VALUES, "fp32")


@pytest.fixture
def judge(truth: Truth) -> Judge:
    judge = Judge(truth)
    for member, peer in enumerate(MEMBERS):
        judge.register(peer, Contribution(member, 7, member + 1.0))
    return judge


@pytest.mark.parametrize(
    "break_it",
    [
        lambda tensor: tensor.mul_(1.001),
        lambda tensor: tensor[700_000].add_(0.01),
        lambda tensor: tensor[-1].fill_(float("nan")),
    ],
    ids=["scaled", "one value", "nan"],
)
def test_a_wrong_mean_is_found(judge: Judge, truth: Truth, break_it: Break) -> None:
    wrong = mean(truth)
    break_it(wrong)
    judge.judge("peer0", ended(0, ok()), wrong)
    assert "is not the mean" in judge.violations[0]


def test_a_mean_of_other_contributions_than_those_it_names_is_found(judge: Judge, truth: Truth) -> None:
    judge.judge("peer0", ended(0, ok(members=(0, 1))), mean(truth))
    assert "is not the mean" in judge.violations[0]
    invented = ok("e")
    invented.contributors["peer2"] = 2.5
    judge.judge("peer1", ended(1, invented), mean(truth))
    assert "nobody made" in judge.violations[-2]


def test_members_that_differ_and_contributions_counted_twice_are_found(judge: Judge, truth: Truth) -> None:
    judge.judge("peer0", ended(0, ok()), mean(truth))
    judge.judge("peer1", ended(1, ok(), print="other"), mean(truth))
    assert "differs from member 0" in judge.violations[0]
    judge.judge("peer2", ended(2, ok("e", round=8), print="third"), mean(truth))
    assert "a second time" in judge.violations[2]


def test_a_failure_that_is_late_without_a_reason_or_touched_the_tensor_is_found(
    judge: Judge, truth: Truth
) -> None:
    judge.judge("peer0", ended(0, Outcome(ok=False, reason=""), took=6.5), mean(truth))
    for said, violation in zip(
        ("returned after 6.50 s", "without a reason", "its tensor has changed"),
        judge.violations,
        strict=False,
    ):
        assert said in violation
