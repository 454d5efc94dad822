"""Whose word for the group's state a peer takes: identities are free, so heads alone prove nothing.

A peer that has trained with others, by rounds in which they held one state, does not leave that state for one that
only strangers hold, whatever their number or epoch. It believes those that it has trained with, so a peer that was cut
off, or has trained alone meanwhile, comes back to them. Only where none of them is left does it follow the strangers:
so a survivor of one island joins the other island, while two islands of several peers each keep their states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal

from equipoise.averaging.state import StateId, group_state
from equipoise.peer.training.events import RoundSucceeded

Trust = Literal["known", "heads"]
"""Whose claims make the group's state: of those that this peer has trained with, or of all, each counting alike."""

MAX_KNOWN = 256
"""Peers remembered as those that this one has trained with: four groups of the largest size. The least recent go."""

ROUNDS_APART = 3
"""Rounds without any peer that is known, before strangers are followed: where a round takes longer than `patience`, one
round that the others were late for must not be enough."""


class Known:
    """The peers that one peer, `name`, has trained with.

    Args:
        name: PeerID of the one that remembers them.
        trust: `heads`: it takes the word of all, whether it has trained with them or not.
        patience: Seconds without any of them after which strangers are followed, if no other peer is known either, and
            `ROUNDS_APART` rounds have passed.
        now: Seconds of the clock that `group` is given.
    """

    def __init__(self, name: str, trust: Trust, patience: float, now: float) -> None:
        self._name = name
        self._trust = trust
        self._patience = patience
        self._names: OrderedDict[str, None] = OrderedDict()
        self._met_at = now
        self._apart = 0

    def add(self, names: Iterable[str]) -> None:
        """Remember peers that gave to a mean, and held the state to which it was applied."""
        for name in names:
            if name != self._name:
                self._names[name] = None
                self._names.move_to_end(name)
        while len(self._names) > MAX_KNOWN:
            self._names.popitem(last=False)

    @property
    def names(self) -> tuple[str, ...]:
        """PeerIDs of the only peers whose snapshots are taken, while one of them is there; empty if all peers' are."""
        return () if self._trust == "heads" else tuple(self._names)

    def group(self, round: RoundSucceeded, now: float) -> StateId | None:
        """The state that this peer takes for the group's after a round; None if nobody whom it believes claims one."""
        if self._trust == "heads" or not self._names:
            return round.group
        claims = {
            name: state for name, state in round.states.items() if name in self._names or name == self._name
        }
        if any(name in self._names for name in round.members):
            self._met_at, self._apart = now, 0
        elif not round.missing:
            self._apart += 1
            if self._apart >= ROUNDS_APART and now - self._met_at >= self._patience:
                self._names.clear()
                return round.group
        return group_state(claims.values())
