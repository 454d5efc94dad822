"""A rate that several takers share fairly."""

from __future__ import annotations

import asyncio

BURST_SECONDS = 0.25
"""What was not taken for so long may be taken at once: control messages do not wait for bulk that has passed."""


class Allowance:
    """At most `rate` bytes a second, averaged over `BURST_SECONDS`; takers are served in the order of their asking.

    That is the generic cell rate algorithm (ITU-T I.371): a time up to which everything is taken already.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._taken_until = float("-inf")

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may pass."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._taken_until = max(self._taken_until, now - BURST_SECONDS) + count / self._rate
        if self._taken_until > now:
            await asyncio.sleep(self._taken_until - now)
