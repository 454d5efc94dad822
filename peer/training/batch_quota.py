"""This peer's share of the target batch, which it accumulates before it meets the others.

A peer learns the others' accumulated weight a moment late. So equally fast peers, each with its last micro-batch done,
would all find the swarm below its target, and all make another micro-batch. Therefore each peer makes a share: the
micro-batches of the target are dealt out in proportion to the last contributions. A peer that had to wait for the
others makes as many more as fit into the wait, and the others' shares shrink by that. A peer that has only observed
meets at once: the others do not wait for a share of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from equipoise.averaging.outcome import Outcome

SLACK = 1 - 1e-6
"""Share of a target that counts as all of it, because weights are sums of floats."""

FORMING_SECONDS = 0.5
"""Time to form a group on a busy machine, even if no peer is late: it does not count as a wait."""

NOTABLE = 0.5
"""Least wait, in micro-batches' time, of a peer that makes more: the others waited for peers that waited less."""

MARGIN = 0.75
"""Part of a micro-batch's time to leave unused: the others would wait for a peer that fills all of its wait."""


class BatchQuota:
    """This peer's share of the target batch. Times are the seconds of any steady clock.

    `batch` is the weight of the last micro-batch, `given` that of the last contribution, which the loop notes.
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self._quota = self.batch = target
        self._returned: float | None = None
        self._batch_seconds = self.given = 0.0
        self._last: Outcome | None = None

    def computed(self, now: float, batch: float) -> None:
        """Note that a micro-batch of the weight `batch` is done; it took the time since `returned`."""
        self.batch = batch
        if self._returned is not None:
            self._batch_seconds = now - self._returned

    def returned(self, now: float) -> None:
        """Note that the loop goes on."""
        self._returned = now

    def reached(self, local: float, swarm: float) -> bool:
        """Return whether to meet: the swarm has the target, or this peer its share, and likely the others theirs."""
        return swarm >= self._target * SLACK or local >= self._quota * SLACK

    def ended(self, outcome: Outcome | None, peer: str) -> bool:
        """Note the last round of this peer, `peer`; return whether it is another one than before, and succeeded."""
        is_news, self._last = outcome is not self._last, outcome
        if outcome is None or not outcome.ok or not is_news:
            return False
        if peer not in outcome.contributors:  # The others do not know this peer's pace, and will not wait.
            self._quota = 0.0
            return True
        units = deal(math.ceil(self._target / self.batch), outcome.contributors).get(peer, 0)
        waited = outcome.seconds.get("matchmaking", 0.0)
        spare = (waited - FORMING_SECONDS) / self._batch_seconds if self._batch_seconds > 0 else 0.0
        if spare >= NOTABLE:
            made = round(outcome.capped.get(peer, outcome.contributors[peer]) / self.batch)
            units = max(units, made + round(spare - MARGIN))
        self._quota = min(units * self.batch, self._target)
        return True

    def alone(self) -> None:
        """Note that no other peer makes a share."""
        self._quota = self._target


def deal(units: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Whole units in proportion to weights, by largest remainders (Hamilton's method); ties to the first by name."""
    total = sum(weights.values())
    if total <= 0:
        return {}
    exact = {name: units * weight / total for name, weight in sorted(weights.items())}
    dealt = {name: math.floor(share) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: (dealt[name] - exact[name], name))
    for name in by_rest[: units - sum(dealt.values())]:
        dealt[name] += 1
    return dealt
