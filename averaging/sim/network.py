"""Links of a simulated network: when what is sent arrives, and what is lost.

A frame that was sent arrives once and in order, or both ends are told that frames were lost: what the drivers' mesh
promises, but for control frames that come again when one of two channels breaks. Control frames overtake bulk.
Scenarios may weaken the order and the once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

PART_BYTES = 256 * 1024
"""What a part counts as when bytes are counted: 256 Ki values in int8."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How the network behaves apart from faults.

    Attributes:
        latency: Seconds, the least and the most of any link.
        transfer: Seconds that a part takes, the least and the most of any link.
        jitter: Most seconds that a frame is delayed for no reason.
        reorders: Whether frames on one link overtake each other.
        duplicates: Share of the frames that come twice.
    """

    latency: tuple[float, float]
    transfer: tuple[float, float]
    jitter: float = 0.0
    reorders: bool = False
    duplicates: float = 0.0


class Link:
    """One direction between two members."""

    def __init__(self, weather: Weather, random: Random) -> None:
        self._epochs = [0, 0]
        self.held_until = 0.0
        self._cuts = 0
        self._weather = weather
        self._random = random
        self._latency = _log_uniform(random, *weather.latency)
        self._transfer = _log_uniform(random, *weather.transfer)
        self._free_at = 0.0
        self._last = [0.0, 0.0]
        self._passing: deque[tuple[float, float]] = deque()
        self._passed = 0

    def arrivals(self, bulk: bool, now: float) -> Iterator[float]:
        """When a frame that is sent now arrives: once, or twice, or never."""
        if self._cuts:
            return
        at = now
        if bulk:
            begins = max(self._free_at, now)
            at = self._free_at = begins + self._transfer
            self._passing.append((begins + self._latency, at + self._latency))
        at += self._latency + self._random.random() * self._weather.jitter
        if not self._weather.reorders:
            at = self._last[bulk] = max(at, self._last[bulk])
        yield at
        if self._weather.duplicates and self._random.random() < self._weather.duplicates:
            yield at + self._random.random()

    def received(self, now: float) -> int:
        """Bytes of parts that have come in so far, also of the part that is under way."""
        if now < self.held_until:
            return self._passed
        while self._passing and self._passing[0][1] <= now:
            self._passing.popleft()
            self._passed += PART_BYTES
        if not self._passing:
            return self._passed
        begun, ends = self._passing[0]
        return self._passed + int(PART_BYTES * max(0.0, now - begun) / (ends - begun))

    def slow_down(self, transfer: float) -> None:
        """From now on a part takes so many seconds."""
        self._transfer = transfer

    def epoch(self, bulk: bool) -> int:
        """Counts the losses so far: a frame sent in an earlier epoch does not arrive."""
        return self._epochs[bulk]

    def drop(self) -> None:
        """The values under way do not arrive."""
        self._epochs[True] += 1
        self._passing.clear()

    def lose(self) -> None:
        """Nothing that is under way arrives."""
        self._epochs[False] += 1
        self.drop()

    def cut(self) -> None:
        """Carry nothing until as many `heal`s as `cut`s."""
        self.lose()
        self._cuts += 1

    def heal(self) -> None:
        """End one cut."""
        self._cuts -= 1


def _log_uniform(random: Random, least: float, most: float) -> float:
    return least * math.exp(random.random() * math.log(most / least))
