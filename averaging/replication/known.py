"""The peers whose claims decide which state is the group's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId, group_state
from equipoise.limits import LruDict

Trust = Literal["known", "heads"]
"""The peers whose claims decide the group's state: peers that this peer has trained with, or all with equal votes."""

MAX_KNOWN = 256
"""Most peers remembered that this peer has trained with: four of the largest groups. The least recent are forgotten."""

ROUNDS_APART = 3
"""Fewest rounds without a known peer before this peer follows strangers: the known peers may be late for one round."""


class Known:
    """The peers that one peer, `name`, believes: those that its user `named`, and those that it has trained with.

    A newcomer, which has trained with nobody, follows the named peers while one of them is in the run and has trained,
    and else most peers. Later it follows strangers after `patience` seconds, and `ROUNDS_APART` rounds that nobody
    missed, without a known peer.

    With the trust `heads` it counts the claims of all peers, known or not.
    """

    def __init__(
        self, name: str, trust: Trust, patience: float, now: float, named: Iterable[str] = ()
    ) -> None:
        self._name = name
        self._named = frozenset(named) - {name}
        self._trust = trust
        self._patience = patience
        self._names = LruDict[str, None](MAX_KNOWN)
        self._met_at = now
        self._apart = 0

    def add(self, names: Iterable[str]) -> None:
        """Remember peers that contributed to a mean, and held the state to which it was applied."""
        for name in names:
            if name != self._name:
                self._names[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """PeerIDs of the only peers to take snapshots from, while one of them is there; empty for all peers."""
        return () if self._trust == "heads" else (*self._named, *self._names)[:MAX_KNOWN]

    @property
    def trained(self) -> bool:
        """Whether this peer has trained with others, so that no stranger's snapshot is of use."""
        return self._trust != "heads" and bool(self._names)

    def awaits(self, outcome: Outcome) -> bool:
        """Whether this peer is a newcomer, and none of the named peers has claimed a state in a round."""
        if self._trust == "heads" or self._names or not self._named:
            return False
        return self._named.isdisjoint(outcome.states)

    def group(self, outcome: Outcome, missing: int, now: float, elsewhere: bool = False) -> StateId | None:
        """The group's state after a round that `missing` known peers missed, by the peers that this peer believes.

        None if none of them claims a state, or, with `elsewhere`, while an awaited peer holds a trained state. While
        nobody has trained, all choose alike among all claims: there is nothing to lose, and no state to prefer.
        """
        own = outcome.states.get(self._name)
        if self.awaits(outcome) and elsewhere:
            return own if own is not None and own.epoch and own == outcome.state else None
        untrained = not self._names and not any(state.epoch for state in outcome.states.values())
        if self._trust == "heads" or untrained or self.awaits(outcome) or not (self._names or self._named):
            return outcome.state
        believed = {self._name, *self._named, *self._names}
        claims = {name: state for name, state in outcome.states.items() if name in believed}
        if any(name in self._names for name in outcome.group):
            self._met_at, self._apart = now, 0
        elif self._names and not missing:
            self._apart += 1
            if self._apart >= ROUNDS_APART and now - self._met_at >= self._patience:
                self._names.clear()
                return outcome.state
        return group_state(claims.values(), outcome.states.values())
