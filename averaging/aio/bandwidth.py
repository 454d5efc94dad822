"""Feeds the bandwidth estimate while this daemon sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from equipoise.averaging.bandwidth import Bandwidth

METER_SECONDS = 0.05
"""Between two looks at what has been delivered, while something waits to be sent."""


class Meter:
    """Samples a counter from `start` until nothing waits any more.

    Args:
        delivered: Bytes delivered to all peers so far.
        sending: Whether something waits to be sent.

    Attributes:
        bandwidth: The estimate.
    """

    def __init__(self, delivered: Callable[[], int], sending: Callable[[], bool]) -> None:
        self.bandwidth = Bandwidth()
        self._delivered = delivered
        self._sending = sending
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Something waits to be sent; nothing happens if that is known."""
        if self._timer is None:
            self._sample()

    def stop(self) -> None:
        """Sample no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _sample(self) -> None:
        now, delivered = self._loop.time(), self._delivered()
        if self._sending():
            self.bandwidth.observe(now, delivered)
            self._timer = self._loop.call_later(METER_SECONDS, self._sample)
        else:
            self.bandwidth.end_burst(now, delivered)
            self._timer = None
