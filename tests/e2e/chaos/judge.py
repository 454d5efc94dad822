"""Holds every call of a chaos run to what a round promises (DESIGN, "What a round promises"; RELIABILITY, I1 to I4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from e2e.chaos.member import Call
from e2e.chaos.truth import Contribution, Error, Truth
from equipoise.averaging.outcome import Outcome

OVERTIME = 1.0
"""Seconds past its timeout within which a call must return, whatever happens (I4)."""


@dataclass(frozen=True, slots=True)
class Mean:
    """What the first ok member that named a digest held."""

    contributors: dict[str, float]
    print: str
    member: int


class Judge:
    """Keeps the mean of every group, and every promise that was broken.

    Attributes:
        violations: One line each.
        errors: How far each group's mean was from truth.
    """

    def __init__(self, truth: Truth) -> None:
        self.violations: list[str] = []
        self.errors: list[Error] = []
        self._truth = truth
        self._made: dict[tuple[str, float], Contribution] = {}
        self._means: dict[str, Mean] = {}
        self._digests: dict[tuple[int, tuple[str, ...]], str] = {}
        self._counted: dict[Contribution, str] = {}

    def register(self, peer: str, contribution: Contribution) -> None:
        """A member is about to bring this into a round; its weight tells its contributions apart."""
        self._made[peer, contribution.weight] = contribution

    def judge(self, peer: str, call: Call, tensor: torch.Tensor) -> None:
        """A call has returned, and left the tensor of its member so."""
        before = len(self.violations)
        say = self._sayer(call)
        if call.crash is not None:
            say(f"raised {type(call.crash).__name__}: {call.crash}")
        took = call.ended - call.began
        if took > call.timeout + OVERTIME:
            say(f"returned after {took:.2f} s of a timeout of {call.timeout:g} s ({call.reason})")
        if call.ok:
            self._judge_ok(peer, call, tensor, say)
        elif call.crash is None:
            self._judge_failed(call, tensor, say)
        if len(self.violations) > before and call.outcome is not None:
            self.violations.append(f"    {call.outcome}")

    def _judge_failed(self, call: Call, tensor: torch.Tensor, say: Callable[[str], None]) -> None:
        made = call.contribution
        if not call.reason:
            say("failed without a reason")
        if call.outcome is not None and call.outcome.contributors:
            say("failed, and names contributors")
        if not self._truth.untouched(tensor, made.member, made.round):
            say(f"failed ({call.reason}), but its tensor has changed")

    def _judge_ok(self, peer: str, call: Call, tensor: torch.Tensor, say: Callable[[str], None]) -> None:
        assert call.outcome is not None
        outcome = call.outcome
        if len(outcome.contributors) < 2 or peer not in outcome.group:
            say("is ok with fewer than two contributors, or outside of its group")
        if _claims(outcome).get(peer, call.contribution.weight) != call.contribution.weight:
            say("is ok over another contribution of its own")
        group = outcome.round, outcome.group
        if self._digests.setdefault(group, outcome.digest) != outcome.digest:
            say(f"differs from its group: digest {outcome.digest[:12]}, others {self._digests[group][:12]}")
        mean = self._means.get(outcome.digest)
        if mean is None:
            self._means[outcome.digest] = Mean(outcome.contributors, call.print, call.contribution.member)
            self._judge_mean(call, tensor, say)
        elif (mean.contributors, mean.print) != (outcome.contributors, call.print):
            say(f"differs from member {mean.member}, whose digest it shares")

    def _judge_mean(self, call: Call, tensor: torch.Tensor, say: Callable[[str], None]) -> None:
        assert call.outcome is not None
        made = [self._made.get(pair) for pair in _claims(call.outcome).items()]
        known = [one for one in made if one is not None]
        if len(known) < len(made):
            say("names a contribution that nobody made")
            return
        for one in known:
            if self._counted.setdefault(one, call.outcome.digest) != call.outcome.digest:
                say(f"counts the contribution of member {one.member} in round {one.round} a second time")
        counted = call.outcome.contributors.values()
        error = self._truth.error(
            tensor, [replace(one, weight=weight) for one, weight in zip(known, counted, strict=True)]
        )
        self.errors.append(error)
        if not error.share_of_bound <= 1:
            worst = (
                f"{error.share_of_bound:.3g} times what the codec may cost, {error.relative:.3g} in the norm"
            )
            say(f"is not the mean: off by {worst}")

    def _sayer(self, call: Call) -> Callable[[str], None]:
        made = call.contribution
        return lambda text: self.violations.append(f"round {made.round}, member {made.member}: {text}")


def _claims(outcome: Outcome) -> dict[str, float]:
    """What each contributor claimed, by which its contribution is known."""
    return {**outcome.contributors, **outcome.capped}
