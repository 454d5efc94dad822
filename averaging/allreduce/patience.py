"""How long to wait for a member that is slow but delivers: judged by its bytes, and by the pace of the others.

On a slow link one part may take longer than a stall, so whole parts tell too little. A member that delivers
`MIN_BYTES_PER_SECOND` is waited for; whoever sends less has stalled, whatever it trickles.

One slow member must not hold the others until the round's timeout either, be it honest or not. What is fair cannot be
a constant: on fast links all is over within a second, on slow ones a part takes longer than that. So it is measured in
what the others needed: once at least half of those that are awaited are through with a step, after a time T, the rest
have `SLOWNESS` times T more, and `GRACE_STALLS` stalls for differences that are not of the link. As a hostile minority
can neither delay that half nor make it look slower, it costs a round that much and no more. Where more than half are
slow, the links are what they are, and all that deliver are waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

MIN_BYTES_PER_SECOND = 16_000
"""Who sends less has stalled: at this rate even a part of 64 Ki values in int8 takes 4 s."""

SLOWNESS = 8
"""Links of one group may differ that much: 50 Mbit/s beside 200 is 4, and two rounds that share a link make it 8."""

GRACE_STALLS = 2
"""Beyond it; for members that began later, or were paused, while the others needed next to no time."""


class Patience:
    """How long one member waits for the others in the present step of the round.

    Args:
        stall: Seconds without progress that count as a stall.
        now: Monotonic seconds.

    Attributes:
        ends_at: When those still awaited have had enough time; infinite while that is not known.
        spent: Whether it has ended in this step.
    """

    def __init__(self, stall: float, now: float) -> None:
        self._grace = GRACE_STALLS * stall
        self._step: Hashable = None
        self._began = now
        self._window_began = now
        self._bytes: Counter[int] = Counter()
        self.ends_at = float("inf")
        self.spent = False

    def begin(self, step: Hashable, now: float) -> None:
        """The round may have come to another step: then everyone has time anew."""
        if step != self._step:
            self._step = step
            self._began = now
            self.ends_at = float("inf")
            self.spent = False

    def count(self, member: int, received: int) -> None:
        """So many bytes, of any frame that is of use, have come in from a member."""
        self._bytes[member] += received

    def open_window(self, now: float) -> None:
        """Bytes are counted from now on."""
        self._window_began = now
        self._bytes.clear()

    def look(self, awaited: int, of: int, now: float) -> None:
        """See whether half of the members in the bitmask `of` are through, all but the `awaited`."""
        if not awaited:
            self.ends_at = float("inf")
        elif self.ends_at == float("inf") and not self.spent and 2 * awaited.bit_count() <= of.bit_count():
            self.ends_at = now + SLOWNESS * (now - self._began) + self._grace

    def end(self) -> None:
        """Nobody is waited for any longer in this step."""
        self.spent = True
        self.ends_at = float("inf")

    def delivering(self, awaited: int, now: float) -> int:
        """Bitmask of the awaited that delivered enough since the window was opened; nobody once patience is spent."""
        enough = MIN_BYTES_PER_SECOND * (now - self._window_began)
        if self.spent or now >= self.ends_at:
            return 0
        return sum(1 << one for one, count in self._bytes.items() if awaited >> one & 1 and count >= enough)
