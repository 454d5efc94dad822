"""Why connections and credentials were refused, counted, so that `status` can tell."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

from equipoise.dht.sanitize import printable

Why = Literal[
    "malformed preface",
    "other version",
    "other peer",
    "not a member",
    "impostor",
    "malformed credential",
    "tls failure",
    "timeout",
    "too many",
    "went away",
]
"""`other peer`: the caller wanted to dial another peer. `impostor`: the other side does not hold the expected key."""

LINE_SECONDS = 1.0
"""Shortest time between two lines of the log about one reason: refusals may come thousands of times a second."""

_log = logging.getLogger(__name__)


class Refused(ConnectionError):
    """A connection or a credential is refused; the message gives the reason in one line, `why` its category."""

    def __init__(self, why: Why, text: str) -> None:
        super().__init__(text)
        self.why: Why = why


class Refusals:
    """Counts refusals by reason, keeps the last in words, and logs at most one line a second about each reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._unlogged: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}
        self.last = ""

    def note(self, why: Why, text: str, now: float) -> None:
        """Count one refusal at `now` (seconds, monotonic); a line tells how many refusals before it had no line."""
        self.counts[why] += 1
        self.last = printable(f"{why}: {text}")
        if now - self._logged_at.get(why, float("-inf")) < LINE_SECONDS:
            self._unlogged[why] += 1
            return
        self._logged_at[why] = now
        more = self._unlogged.pop(why, 0)
        _log.info("refused: %s%s", self.last, f" (and {more} more for this reason before it)" if more else "")
