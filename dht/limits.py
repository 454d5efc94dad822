"""Bounds on the work that peers can cause: calls under way, bytes carried, records verified."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from equipoise.limits import MAX_PEERS, LruDict, RateLimit

SIGNATURES_PER_SECOND = 100.0
SIGNATURES_BURST = 300.0
"""Most records of one sender that are verified, at 0.15 ms each; a run-mate sends 10 a second in each run."""
KNOWN_PER_SECOND = 1000.0
KNOWN_BURST = 2000.0
"""Most own records of peers whose records are kept already that are verified for all of them together: a sixth of a
core. A run-mate is told by eight peers up to 10 times a second, by each of more of them less often."""
UNKNOWN_PER_SECOND = 100.0
UNKNOWN_BURST = 600.0
"""Most records verified for all senders together that they pass on; and most of peers that are new here, of which each
tells its own. Strangers that pass on any number, or come with many PeerIDs, must not crowd out the known."""
DISTRUST_SECONDS = 60.0
"""Time for which a peer that has sent a forged record is ignored."""
HANDSHAKES_PER_SECOND, HANDSHAKES_BURST = 200.0, 512.0
"""Most handshakes of connections that come in, at 1.1 ms each: a fifth of a core. A group of 64 peers of one machine
may dial at once, twice each."""
BURST_SECONDS = 0.25
"""Longest time over which unused rate adds up, so that control messages do not wait for bulk."""

CAP_SECONDS = 0.05
"""Longest time over which the unused rate of a cap adds up: what follows a pause is a hundredth of five seconds."""
STREAM_SHARE = 0.94
"""Share of a stream's bytes among those on the wire; the rest is headers of TCP, IP and Ethernet."""


@dataclass(frozen=True)
class Failure:
    """Why a try failed; the next one may begin at `retry`, `pause` seconds after the failure."""

    reason: str
    retry: float
    pause: float


class Tally(Counter[str]):
    """Counts work under way by name; a name whose count is 0 is forgotten."""

    @contextlib.contextmanager
    def counting(self, *names: str) -> Iterator[None]:
        """Count one more of each of `names` within the context."""
        self.update(names)
        try:
            yield
        finally:
            for name in names:
                self[name] -= 1
                if self[name] <= 0:
                    del self[name]


class Scrutiny:
    """Decides which senders' records are verified. Times are seconds of one monotonic clock.

    Every daemon verifies a record before it keeps it or passes it on. So a peer that sends a record with a false
    signature has forged it, and costs this peer one verification.
    """

    def __init__(self) -> None:
        self._senders = RateLimit(SIGNATURES_PER_SECOND, SIGNATURES_BURST)
        self._known = RateLimit(KNOWN_PER_SECOND, KNOWN_BURST)
        self._unknown = RateLimit(UNKNOWN_PER_SECOND, UNKNOWN_BURST)
        self._distrusted: LruDict[str, float] = LruDict(MAX_PEERS)

    def admits(self, sender: str, author: str, known: bool, now: float) -> bool:
        """Tell whether to verify a record of `author` that `sender` has sent; `known` if one of its records is kept."""
        if self.distrusts(sender, now) or not self._senders.allow(sender, now):
            return False
        if sender == author and known:
            return self._known.allow("", now)
        return self._unknown.allow("new" if sender == author else "hearsay", now)

    def distrust(self, sender: str, now: float) -> None:
        """Note that `sender` has sent a forged record."""
        self._distrusted[sender] = now + DISTRUST_SECONDS

    def distrusts(self, sender: str, now: float) -> bool:
        """Tell whether `sender` is ignored for now."""
        return now < self._distrusted.get(sender, float("-inf"))


class Handshakes:
    """Decides which connections get a handshake. Times are seconds of one monotonic clock."""

    def __init__(self, met: Container[str | None]) -> None:
        """`met` holds the PeerIDs of peers met in rounds."""
        self._blocks = RateLimit(HANDSHAKES_PER_SECOND / 4, HANDSHAKES_BURST / 2)
        self._anybody = RateLimit(HANDSHAKES_PER_SECOND * 3 / 4, HANDSHAKES_BURST * 3 / 4)
        self._acquainted = RateLimit(HANDSHAKES_PER_SECOND / 4, HANDSHAKES_BURST / 4)
        self._met = met
        self._last: LruDict[str, str] = LruDict(MAX_PEERS)

    def note(self, block: str, peer: str) -> None:
        """Note that `peer` has proved its PeerID from a block of addresses."""
        self._last[block] = peer

    def admits(self, block: str, now: float) -> bool:
        """Tell whether to shake hands with a caller from a `block` of addresses.

        A quarter of all handshakes is kept for blocks where peers were met; no block has more than a third of the rest.
        """
        if self._last.get(block) in self._met and self._acquainted.allow("", now):
            return True
        return self._blocks.allow(block, now) and self._anybody.allow("", now)


class TokenBucket:
    """At most `rate` bytes a second, averaged over `burst` seconds; callers are served in the order of their calls.

    This is the generic cell rate algorithm (ITU-T I.371): its state is the time up to which the rate is used up.
    """

    def __init__(self, rate: float, burst: float = BURST_SECONDS) -> None:
        self._rate = rate
        self._burst = burst
        self._taken_until = float("-inf")

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may pass."""
        self.spend(count)
        await self.wait()

    def spend(self, count: int) -> None:
        """Note that `count` bytes pass now."""
        now = asyncio.get_running_loop().time()
        self._taken_until = max(self._taken_until, now - self._burst) + count / self._rate

    async def wait(self) -> None:
        """Wait until all bytes that were noted so far may have passed."""
        if (left := self._taken_until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)


class Caps:
    """The caps on all channels of a daemon together.

    Args:
        upload: Most bytes per second on the wire that it sends; 0 for no cap.
        download: Most that it receives, likewise.

    Attributes:
        upload: Passes what streams send; None without a cap.
        download: Passes what they receive; None without a cap.
    """

    def __init__(self, upload: float = 0.0, download: float = 0.0) -> None:
        self.upload, self.download = (
            TokenBucket(rate * STREAM_SHARE, CAP_SECONDS) if rate else None for rate in (upload, download)
        )
