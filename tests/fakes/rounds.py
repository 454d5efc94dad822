"""The ends of rounds and downloads, as a follower hears of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.averaging.replication.events import Fetched, RoundEnded
from equipoise.averaging.state import StateId


def succeeded(
    states: Mapping[str, StateId],
    digest: str,
    weights: Mapping[str, float],
    members: Iterable[str],
    missing: int = 0,
) -> RoundEnded:
    outcome = Outcome(
        ok=True,
        reason="",
        states=dict(states),
        digest=digest,
        contributors=dict(weights),
        group=tuple(members),
    )
    return RoundEnded(outcome, missing)


def failed(reason: str, formed: bool = False, late: float = 0.0) -> RoundEnded:
    return RoundEnded(Outcome(ok=False, reason=reason, group=("a", "b") if formed else (), late=late))


def snapshot(state: StateId, voters: tuple[str, ...] = ()) -> Fetched:
    return Fetched(FetchOutcome(ok=True, reason="", state=state, voters=voters))


def mean(outcome: Outcome) -> Fetched:
    return Fetched(FetchOutcome(ok=True, reason="", state=outcome.state, round=outcome))


def nothing(reason: str, unheard: int = 0, beyond: int = 0) -> Fetched:
    return Fetched(FetchOutcome(ok=False, reason=reason, unheard=unheard, beyond=beyond))
