"""The ledger of a run: in how many rounds each peer's contribution counted, by the lists that all members signed."""

from __future__ import annotations

from collections import Counter

import msgspec

from equipoise.averaging.counts import count
from equipoise.averaging.outcome import Outcome
from equipoise.limits import LruDict

MAX_PEERS = 1024
"""Most peers of a run that are remembered; the peer that contributed least recently is forgotten."""

MAX_ROUNDS = 256
"""Most rounds whose end may still change, as a round that failed here and whose mean is downloaded later."""

COUNTED, LATE, AWAY = "counted", "late", "away"


class Given(msgspec.Struct):
    """What a peer has given to a run, as far as a daemon knows its rounds.

    Attributes:
        rounds: Rounds since the peer's first.
        counted: Those of them in whose mean the peer's contribution counts.
        samples: The weights that counted, added up.
        bytes: The bytes of the contributions that counted, as the codec encodes them.
        missed: The other rounds by reason, of this peer alone: `late`, `no group`, `failed`, `left out` of a mean by a
            leader's word, `attended` without giving anything, `away` while others made a round.
    """

    rounds: int = 0
    counted: int = 0
    samples: float = 0.0
    bytes: int = 0
    missed: dict[str, int] = {}

    def __str__(self) -> str:
        """One line for people."""
        told = f"contributed to {self.counted} of {count(self.rounds, 'round')}, {self.samples:,.10g} samples"
        why = ", ".join(f"{number} {reason}" for reason, number in self.missed.items())
        return f"{told}; {sum(self.missed.values())} missed: {why}" if why else told


class Ledger:
    """Counts the rounds of one run, each once: those that end at this peer, and those whose means it downloads."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._given: LruDict[str, Given] = LruDict(MAX_PEERS)  # Its `rounds` are those before, below 0.
        self._listed: LruDict[str, None] = LruDict(MAX_ROUNDS)
        self._ends: LruDict[int, str] = LruDict(MAX_ROUNDS)
        self._totals: Counter[str] = Counter()
        self._known = self._away = 0
        self._is_late = False

    def add(self, outcome: Outcome, size: int) -> None:
        """Count a round; `size` is that of an encoded contribution in bytes."""
        if outcome.ok and not outcome.givers:
            return  # Peers that meet.
        if outcome.ok and outcome.digest not in self._listed:
            self._listed[outcome.digest] = None
            for peer in outcome.givers:
                given = self._given[peer] = self._given.get(peer) or Given(-self._known)
                given.counted, given.bytes = given.counted + 1, given.bytes + size
                given.samples += outcome.contributors[peer]
            self._known += 1
        self._end(outcome, self._reason(outcome))

    def begin(self) -> None:
        """Go on with a script that has just joined: if all peers begin again, so do the numbers of rounds."""
        self._ends.clear()

    def of(self, peer: str) -> Given:
        """What a peer has given."""
        given = self._given.get(peer) or Given(-self._known)
        if peer != self._me:
            return msgspec.structs.replace(given, rounds=self._known + given.rounds)
        missed = {reason: number for reason, number in self._totals.items() if number and reason != COUNTED}
        return msgspec.structs.replace(given, rounds=given.counted + sum(missed.values()), missed=missed)

    def _end(self, outcome: Outcome, reason: str) -> None:
        """Note this peer's part in a round; the word of a later attempt, or of the mean that came after all, counts.

        A late contribution's outcome may have the number of the next round; that of its own comes with the mean.
        """
        number = outcome.round
        if reason == LATE:
            self._is_late, number, self._away = not self._away, self._away, 0
        elif outcome.ok:
            reason = LATE if self._is_late and reason != COUNTED else reason
            self._is_late, self._away = False, number if reason == AWAY else 0
        before = self._ends.get(number, "")
        if number and before != COUNTED and not (before and reason == AWAY):
            self._totals[reason] += 1
            self._totals[before] -= bool(before)
            self._ends[number] = reason

    def _reason(self, outcome: Outcome) -> str:
        if outcome.late:
            return LATE
        if not outcome.ok:
            return "failed" if outcome.group else "no group"
        if self._me in outcome.givers:
            return COUNTED
        if self._me in outcome.left_out:
            return "left out"
        return "attended" if self._me in outcome.group else AWAY
