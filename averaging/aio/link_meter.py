"""Measures the bandwidth of this daemon's link, up and down, while bulk moves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from equipoise.averaging.aio.bandwidth import IDLE_BYTES, Bandwidth
from equipoise.averaging.aio.peer_channels import PeerChannels
from equipoise.averaging.ports import Channel


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
