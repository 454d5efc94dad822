"""What a script counts of the rounds of its run, for people and curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from equipoise.averaging.outcome import Outcome


class Totals:
    """Counts rounds that have ended.

    Attributes:
        ok: Number of rounds that were ok.
        failed: Number of rounds that failed.
        last_ok: The last round that was ok.
        why_not: Why the last failed round failed.
        last_mean: The last round that made a mean.
        sums: Bytes sent and received, and rounds in which this peer's contribution counts.
    """

    def __init__(self) -> None:
        self.ok = self.failed = 0
        self.last_ok: Outcome | None = None
        self.why_not = ""
        self.last_mean: Outcome | None = None
        self.sums: Counter[str] = Counter()

    def add(self, outcome: Outcome, counts: bool) -> None:
        """Count a round; `counts` if this peer's contribution is in its mean."""
        if outcome.ok:
            self.ok, self.last_ok = self.ok + 1, outcome
        else:
            self.failed, self.why_not = self.failed + 1, outcome.reason
        sums = {"bytes_sent": outcome.bytes_sent, "bytes_received": outcome.bytes_received}
        self.sums.update(sums, rounds_counted=counts)
        if outcome.givers:  # Else its peers have only met.
            self.last_mean = outcome


def metrics(parts: Sequence[Totals]) -> dict[str, float]:
    """Return the numbers of a run whose rounds are counted in these parts; see `JoinedRun.metrics`."""
    latest = [one.last_mean for one in parts if one.last_mean is not None]
    last = max(latest, key=lambda outcome: outcome.started, default=Outcome(ok=False, reason=""))
    sums = sum((one.sums for one in parts), Counter())
    ok = sum(one.ok for one in parts)
    return {
        **last.metrics,
        **{f"before/{name}": value for name, value in last.evaluation.items()},
        **{f"seconds/{phase}": value for phase, value in last.seconds.items()},
        **{name: sums[name] for name in ("rounds_counted", "bytes_sent", "bytes_received")},
        **{"round": last.round, "group_size": len(last.group), "rounds_ok": ok},
        "rounds": ok + sum(one.failed for one in parts),
    }
