"""The bandwidth of this peer in each direction, learnt from what it sends and receives.

A member's share follows from its bandwidth (`balance`). A link is seldom full: receivers are late, acknowledgements
wait in the receivers' own full links, and small shares end before TCP has found its speed. So only the fastest part of
what was sent tells the bandwidth. The estimate is the rate that the fastest fifth of the bytes of the last bursts
reached. Windows of time are counted by their bytes, because a link that waits fills few of them.

A burst that is sent lasts until the receivers have acknowledged it: the kernel may take all of it at once, and send it
for seconds. A burst that is received lasts as long as bodies of frames come in. What comes in is at most as fast as
others send, so the estimate of a downlink is what others can make use of.

A window is as long as its bytes need, over several bursts on a slow link. The first window of a burst counts only if it
is the only one, because a token bucket that has filled meanwhile passes it faster.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from itertools import accumulate

from equipoise.averaging.aio.peer_channels import PeerChannels
from equipoise.averaging.ports import Channel

SAMPLE_SECONDS = 0.05
"""Most time between two looks at what has been delivered."""

IDLE_BYTES = 16 * 1024
"""Most bytes on their way with which nothing is being sent: heartbeats and the like are always on their way."""

WINDOW_SECONDS = 0.01
"""Least time that a rate is taken over: a wake-up of this process may be late by a millisecond or two."""

MIN_BYTES = 256 * 1024
"""Fewest bytes of a window: with fewer it tells more of round trips and lumps than of bandwidth, as acknowledgements
that wait in a receiver's own full link come in lumps. A link of 1 Mbit/s takes 2 s."""

BURST_SECONDS = 10.0
"""Longest burst: a link that is never idle counts as several, so its bandwidth is known too."""

BURSTS = 6
"""Bursts that count. A round has two, so a link that slows down is known after three rounds."""

FASTEST = 0.2
"""Share of the bytes that were sent at the estimate or faster."""


class Bandwidth:
    """An estimate from samples of a counter of bytes, which were delivered or have come in.

    Args:
        cap: Most bytes per second, by this machine's configuration; 0 for no cap.

    Attributes:
        estimate: Bytes per second; 0 if unknown.
    """

    def __init__(self, cap: float = 0.0) -> None:
        self.estimate = 0.0
        self._cap = cap
        self._began: tuple[float, int] | None = None
        self._last = 0.0, 0
        self._window = 0.0, 0
        self._windows: list[tuple[float, int]] = []
        self._bursts: deque[list[tuple[float, int]]] = deque(maxlen=BURSTS)

    @property
    def told(self) -> float:
        """Bytes per second that others may count on: the estimate, the cap if that is less; 0 if neither is known."""
        return min(self.estimate or self._cap, self._cap or self.estimate)

    @property
    def in_burst(self) -> bool:
        """True from the first look of a burst to its end."""
        return self._began is not None

    def observe(self, now: float, delivered: int) -> None:
        """Something has been waiting or on its way since the last call, if there was one in this burst.

        Args:
            now: Monotonic seconds.
            delivered: Bytes delivered to all peers, or received from them, so far, ever.
        """
        (since, before), self._last = self._last, (now, delivered)
        if self._began is None:
            self._began = self._last
            return
        seconds, count = self._window[0] + now - since, self._window[1] + delivered - before
        self._window = seconds, count
        if seconds >= WINDOW_SECONDS and count >= MIN_BYTES:
            self._add(seconds, count)
        if now - self._began[0] >= BURST_SECONDS:
            self.end_burst(now, delivered)

    @property
    def sample_seconds(self) -> float:
        """Time until the next look: a tenth of what the burst has lasted, so that the end of a short one is known."""
        lasted = self._last[0] - self._began[0] if self._began else 0.0
        return min(max(lasted / 10, WINDOW_SECONDS), SAMPLE_SECONDS)

    def end_burst(self, now: float, delivered: int) -> None:
        """All has been delivered, or the burst has been as long as it may."""
        if self._began is not None and not self._windows:
            # Little was sent, or all of it soon. That it was over so soon is what counts then.
            since, before = self._began
            if delivered - before >= MIN_BYTES and now > since:
                self._add(now - since, delivered - before)
        self._began = None
        if self._windows:
            self._bursts.append(self._windows[1:] or self._windows)
            self._windows = []
            self.estimate = self._fastest()

    def _add(self, seconds: float, count: int) -> None:
        self._window = 0.0, 0
        self._windows.append((count / seconds, count))

    def _fastest(self) -> float:
        windows = sorted((window for burst in self._bursts for window in burst), reverse=True)
        reached = list(accumulate(count for _, count in windows))
        return windows[bisect_left(reached, FASTEST * reached[-1])][0]


class LinkMeter:
    """Samples the bytes of all channels, again and again from the first bulk frame until no bulk moves.

    Args:
        peers: All peers' channels, as they change.
        caps: Most bytes per second that this peer sends, and receives, as others are told; 0 for no cap.

    Attributes:
        upload: The bandwidth of this peer's uplink, as measured while something waits to be sent.
        download: That of its downlink, as measured while bodies of frames come in.
    """

    def __init__(self, peers: Collection[PeerChannels], caps: tuple[float, float]) -> None:
        self.upload, self.download = map(Bandwidth, caps)
        self._peers = peers
        self._loop = asyncio.get_running_loop()
        self._moved_before = [0, 0]
        self._arriving: set[Channel] = set()
        self._timer: asyncio.TimerHandle | None = None

    def sends(self) -> None:
        """Note that a bulk frame is about to be sent."""
        if self._timer is None:
            self._measure(begins=True)

    def receives(self, channel: Channel) -> None:
        """Note that the body of a frame comes in."""
        self._arriving.add(channel)
        if self._timer is None:
            self._measure()

    def received(self, channel: Channel) -> None:
        """Note that the frame is whole, or that it will not be."""
        self._arriving.discard(channel)

    def drop(self, channels: PeerChannels) -> None:
        """Go on counting the bytes that these channels have moved; the peer is no longer among `peers`."""
        self._moved_before[0] += channels.delivered
        self._moved_before[1] += channels.received

    def stop(self) -> None:
        """Measure nothing from now on."""
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self, begins: bool = False) -> None:
        now = self._loop.time()
        sends = begins or any(channels.outbox.has_bulk for channels in self._peers)
        if not sends:  # Else the kernel is not asked, for each of them.
            on_way = sum(channel.in_flight for channels in self._peers for channel in channels.direct)
            sends = on_way > IDLE_BYTES
        pauses = []
        for bandwidth, count, is_busy in (
            (self.upload, self._delivered, sends),
            (self.download, self._received, bool(self._arriving)),
        ):
            if is_busy:
                bandwidth.observe(now, count())
                pauses.append(bandwidth.sample_seconds)
            elif bandwidth.in_burst:  # Else the kernel is not asked for the counts.
                bandwidth.end_burst(now, count())
        self._timer = self._loop.call_later(min(pauses), self._measure) if pauses else None

    def _delivered(self) -> int:
        return self._moved_before[0] + sum(channels.delivered for channels in self._peers)

    def _received(self) -> int:
        return self._moved_before[1] + sum(channels.received for channels in self._peers)
