"""The member whose values came last in a round, by what this member saw and what the others say that they saw."""

from __future__ import annotations

import statistics

from equipoise.averaging.allreduce.messages import MAX_LATE_SECONDS, Late


class Deliveries:
    """When the other members' contributions and means came, in monotonic seconds; the round `began` at such a time."""

    def __init__(self, me: int, size: int, began: float) -> None:
        self._me, self._size, self._began = me, size, began
        self._came: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self._words: dict[int, Late | None] = {}

    def came(self, sender: int, now: float, mean: bool) -> None:
        """Note that a part of a contribution, or of the mean, has come from a member."""
        self._came[mean][sender] = now

    def heard(self, teller: int, word: Late | None) -> None:
        """Note which member was last at another, by its word."""
        self._words[teller] = word if word is not None and word[0] < self._size else None

    @property
    def word(self) -> Late | None:
        """The member that was last here, and seconds: after all others, or in a pair since the phase began."""
        began, late = self._began, dict.fromkeys((*self._came[0], *self._came[1]), 0.0)
        for came in filter(None, self._came):
            *_, (before, _), (at, last) = [(began, -1), *sorted((at, sender) for sender, at in came.items())]
            late[last] += at - before
            began = at
        last = max(late, key=late.__getitem__, default=self._me)
        return None if last == self._me else (last, min(late[last], MAX_LATE_SECONDS))

    @property
    def slowest(self) -> Late | None:
        """The member that the others waited for, and seconds: the median of their words, less the next member's.

        So a few liars name nobody, and where two wait for each other, only the difference counts.
        """
        words = {**self._words, self._me: self.word}
        waits = [(0.0, -1), (0.0, -1)]
        for member in {word[0] for word in words.values() if word is not None}:
            told = [word for teller, word in words.items() if teller != member]
            waits.append(
                (statistics.median(word[1] if word and word[0] == member else 0.0 for word in told), member)
            )
        *_, (next_most, _), (most, member) = sorted(waits)
        return (member, most - next_most) if most > next_most else None
