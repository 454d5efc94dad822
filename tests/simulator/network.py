"""The network of a simulated world: when what is sent arrives, what is lost, and who is told.

A frame that was sent arrives once and in order, or both ends are told that frames were lost: what the drivers' mesh
promises, but for control frames that come again when one of two channels breaks. Control frames overtake bulk.
Scenarios may weaken the order and the once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

from simulator.core import Clock, Process

N = TypeVar("N", bound=Hashable)
P = TypeVar("P", bound=Process)

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
    transfer: tuple[float, float] = (0.0, 0.0)
    jitter: float = 0.0
    reorders: bool = False
    duplicates: float = 0.0


class Link:
    """One direction between two processes.

    Args:
        clock: Of the world.
        weather: What the link's latency and rate are drawn from, if they vary, and how it behaves.
        random: Of the world.

    Attributes:
        open: Whether frames were sent since it was made, or lost what was under way.
        held_until: It delivers nothing before.
        transfer: Seconds that a part takes.
    """

    def __init__(self, clock: Clock, weather: Weather, random: Random) -> None:
        self.open = False
        self.held_until = 0.0
        self._clock = clock
        self._weather = weather
        self._random = random
        self._latency = _log_uniform(random, *weather.latency)
        self.transfer = _log_uniform(random, *weather.transfer)
        self._epochs = [0, 0]
        self._cuts = 0
        self._free_at = 0.0
        self._last = [0.0, 0.0]
        self._passing: deque[tuple[float, float]] = deque()
        self._passed = 0

    def carry(self, to: Process, bulk: bool, event: Callable[..., None], *args: Any) -> None:
        """Have something happen to a process when a frame that is sent now arrives: once, or twice, or never."""
        if self._cuts:
            return
        self.open = True
        at = self._clock.now
        if bulk:
            begins = max(self._free_at, at)
            at = self._free_at = begins + self.transfer
            self._passing.append((begins + self._latency, at + self._latency))
        at += self.delay()
        if not self._weather.reorders:
            at = self._last[bulk] = max(at, self._last[bulk])
        delivery = to, bulk, self._epochs[bulk], event, args
        self._clock.at(at, self._arrive, *delivery)
        if self._weather.duplicates and self._random.random() < self._weather.duplicates:
            self._clock.at(at + self._random.random(), self._arrive, *delivery)

    def delay(self) -> float:
        """Seconds that the next frame is under way, if it waits for no other."""
        return self._latency + self._random.random() * self._weather.jitter

    def _arrive(self, to: Process, bulk: bool, *delivery: Any) -> None:
        if self.held_until > self._clock.now:
            self._clock.at(self.held_until, self._arrive, to, bulk, *delivery)
        else:
            to.happen(False, self._deliver, bulk, *delivery)

    def _deliver(self, bulk: bool, epoch: int, event: Callable[..., None], args: tuple[Any, ...]) -> None:
        # What a stopped process has not read when its connection breaks, is lost as well.
        if self._epochs[bulk] == epoch:
            event(*args)

    def received(self) -> int:
        """Bytes of parts that have come in so far, also of the part that is under way."""
        now = self._clock.now
        if now < self.held_until:
            return self._passed
        while self._passing and self._passing[0][1] <= now:
            self._passing.popleft()
            self._passed += PART_BYTES
        if not self._passing:
            return self._passed
        begun, ends = self._passing[0]
        return self._passed + int(PART_BYTES * max(0.0, now - begun) / (ends - begun))

    def drop(self) -> None:
        """The values under way do not arrive."""
        self._epochs[True] += 1
        self._passing.clear()

    def lose(self) -> None:
        """Nothing that is under way arrives."""
        self.open = False
        self._epochs[False] += 1
        self.drop()

    def cut(self, seconds: float) -> None:
        """Lose what is under way, and carry nothing for a time."""
        self.lose()
        self._cuts += 1
        self._clock.at(self._clock.now + seconds, self._heal)

    def _heal(self) -> None:
        self._cuts -= 1


def _log_uniform(random: Random, least: float, most: float) -> float:
    return least if least == most else least * math.exp(random.random() * math.log(most / least))


class Network(Clock, Generic[N, P]):
    """Processes by their names, the links between them, and what goes wrong with either.

    Links are made when they are first used.

    Attributes:
        random: Of the world.
        processes: By name.
        links: By (sender, receiver).
        breaks: Given how many frames were sent so far, whether the next one breaks its connection: it is lost with
            all that is under way between the two, and both are told.
        calm_at: When the last fault so far is over.
    """

    def __init__(self, weather: Weather, random: Random) -> None:
        super().__init__()
        self.random = random
        self.processes: dict[N, P] = {}
        self.links: dict[tuple[N, N], Link] = {}
        self.breaks: Callable[[int], bool] = lambda sent: False
        self.calm_at = 0.0
        self._sent = 0
        self._weather = weather

    def send(self, sender: N, to: N, event: Callable[..., None], *args: Any) -> None:
        """Have something happen to a process when a frame from another arrives; refuse it if they cannot connect.

        They can where they are connected already, or the other one lives and can be dialled.
        """
        target, link = self.processes.get(to), self.link(sender, to)
        if link.open or self.links[to, sender].open or (target and target.dialable and not target.dead):
            self.transmit(sender, to, event, *args)
        else:
            self.processes[sender].after(link.delay(), self.processes[sender].lose, to, "refused", False)

    def transmit(self, sender: N, to: N, event: Callable[..., None], *args: Any, bulk: bool = False) -> None:
        """Have something happen to a process when a frame from another that it is connected to arrives."""
        self._sent += 1
        if self.breaks(self._sent - 1):
            self.sever(sender, to)
        else:
            self.link(sender, to).carry(self.processes[to], bulk, event, *args)

    def link(self, sender: N, to: N) -> Link:
        """From one process to another; the one back is made with it."""
        if (sender, to) not in self.links:
            for pair in ((sender, to), (to, sender)):
                self.links[pair] = Link(self, self._weather, self.random)
        return self.links[sender, to]

    def calm(self, seconds: float) -> float:
        """A fault goes on for so long; returns until when."""
        self.calm_at = max(self.calm_at, self.now + seconds)
        return self.now + seconds

    def stop(self, name: N, seconds: float, timers_first: bool = False) -> None:
        """Stop a process for a time."""
        process = self.processes[name]
        if not process.dead and not process.stopped:
            process.stop()
            self.at(self.calm(seconds), process.resume, timers_first)

    def kill(self, name: N, noticed: float | None = 0.0) -> None:
        """Kill a process.

        Args:
            name: Whose.
            noticed: Seconds until the others' connections to it break, at most; None: only its silence tells.
        """
        self.processes[name].kill()
        for sender, to in self.links:
            if sender == name and noticed is not None:
                self.at(self.calm(noticed * self.random.random()), self._broke, sender, to)

    def _broke(self, dead: N, other: N) -> None:
        self.links[dead, other].lose()
        self.links[other, dead].lose()
        self._lost(other, dead)

    def sever(self, one: N, other: N) -> None:
        """Break the connection between two processes, which can be opened again at once; both are told."""
        for sender, to in ((one, other), (other, one)):
            link = self.link(sender, to)
            link.lose()
            self.at(self.now + link.delay(), self._lost, sender, to)

    def cut(self, links: Iterable[tuple[N, N]], seconds: float, noticed: float) -> None:
        """Have links lose what is under way, and carry nothing for a time.

        Args:
            links: (sender, receiver) of each.
            seconds: For how long; 0 is a connection that broke and was opened again.
            noticed: Seconds until the ends of each link are told that frames were lost, at most.
        """
        for sender, to in links:
            if (sender, to) in self.links:
                self.calm(seconds)
                self.links[sender, to].cut(seconds)
                for one, other in ((sender, to), (to, sender)):
                    self.at(self.calm(noticed * self.random.random()), self._lost, one, other)

    def drop(self, links: Iterable[tuple[N, N]]) -> None:
        """One of two channels breaks: values under way on links are lost, and only their senders are told.

        Control frames go on, as the mesh sends them again by the other channel.
        """
        for sender, to in links:
            if link := self.links.get((sender, to)):
                link.drop()
                self._lost(sender, to, "one of its channels broke", True)

    def hold(self, links: Iterable[tuple[N, N]], seconds: float) -> None:
        """Have links deliver nothing for a time, and lose nothing."""
        for link in filter(None, map(self.links.get, links)):
            link.held_until = self.calm(seconds)

    def slow(self, links: Iterable[tuple[N, N]], transfer: float) -> None:
        """From now on, have a part take so many seconds on some links."""
        for link in filter(None, map(self.links.get, links)):
            link.transfer = transfer

    def _lost(self, name: N, other: N, reason: str = "connection reset", connected: bool = False) -> None:
        if process := self.processes.get(name):
            process.happen(False, process.lose, other, reason, connected)
