"""When trainers that apply the same means may have come to differ, as each can tell from its own outcomes.

A peer that is late for a group misses that round's mean, and its model differs from the others' from then on. All who
meet it in its next group can see that: it finds a gap in the rounds that it took part in, and the others find someone
who was not in their last group. So all members of that group decide alike, without a word, to exchange their states.
"""

from __future__ import annotations

from equipoise.averaging.outcome import Outcome

UP_TO_DATE = 1.0
"""Weight with which a peer that has missed nothing contributes its state."""

OBSERVER = 0.0
"""Weight of a peer that has missed a mean: it takes over the others' state."""


class Lockstep:
    """Follows the outcomes of one trainer, all of them, in order."""

    def __init__(self) -> None:
        self._group: frozenset[str] | None = None
        self._round = -1  # Rounds are numbered from 0, and all trainers start from one state.

    def follow(self, outcome: Outcome) -> float | None:
        """Take in an outcome; returns the weight with which to exchange states now, or None where all are alike."""
        if not outcome.group:
            return None
        missed = outcome.round > self._round + 1
        joined = self._group is not None and not self._group.issuperset(outcome.group)
        self._round, self._group = outcome.round, frozenset(outcome.group)
        if not missed and not joined:
            return None
        return OBSERVER if missed else UP_TO_DATE
