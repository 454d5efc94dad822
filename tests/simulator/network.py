"""The network of a simulated world: when what is sent arrives, what a break delays, and who is told.

Each end of a link has the product's own session and send queue (`session.outbox.Outbox`), so frames are numbered,
acknowledged and written again by the code that the daemon runs. A break loses what is under way; the session brings it
by the next channel. Control frames overtake bulk that has not been written yet.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.session.machine import SESSION_BYTES, Hello
from equipoise.averaging.session.messages import ENVELOPE_BYTES, decode_envelope
from equipoise.averaging.session.outbox import Frame, Outbox
from simulator.core import Clock, Violation

if TYPE_CHECKING:
    from simulator.process import Process

PART_BYTES = 256 * 1024
"""What a part counts as when bytes are counted: 256 Ki values in int8."""

REDIAL_SECONDS = 0.1
"""Time between two attempts to open a channel while a link is cut."""

BODY = b"values"
"""Stands for the body of every bulk frame."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How the network behaves apart from faults.

    Attributes:
        latency: Seconds, the least and the most of any link.
        transfer: Seconds that a part takes, the least and the most of any link.
        jitter: Most seconds that a frame is delayed for no reason.
        lingers: Share of the breaks in which what is under way arrives all the same, and so comes twice.
    """

    latency: tuple[float, float]
    transfer: tuple[float, float] = (0.0, 0.0)
    jitter: float = 0.0
    lingers: float = 0.0


class Link:
    """One direction between two processes: the sender's end of their session, and what is under way.

    Args:
        clock: Of the world.
        weather: What the link's latency and rate are drawn from, if they vary, and how it behaves.
        random: Of the world.

    Attributes:
        outbox: The sender's session with the receiver, and what it wants to send.
        channel: The channel that the sender writes to; None while it knows of none.
        contents: What happens when a frame arrives, by the frame's header.
        broken: The channel that broke last: what is written to it is lost while its sender does not know.
        cuts: How many faults keep a channel from being opened.
        under_way: Epoch and header of each frame that was written and has not arrived.
        epoch: Of what is under way: it grows when that is lost.
        held_until: It delivers nothing before.
        free_at: When the bulk frame that is being written has left.
        transfer: Seconds that a part takes.
    """

    def __init__(self, clock: Clock, weather: Weather, random: Random) -> None:
        self.outbox = Outbox(random.randbytes(SESSION_BYTES))
        self.channel: object | None = object()
        self.contents: dict[bytes, tuple[Callable[..., None], tuple[Any, ...]]] = {}
        self.broken: object | None = None
        self.cuts = 0
        self.under_way: deque[tuple[int, bytes]] = deque()
        self.epoch = 0
        self.held_until = 0.0
        self.free_at = 0.0
        self.transfer = _log_uniform(random, *weather.transfer)
        self._latency = _log_uniform(random, *weather.latency)
        self._clock = clock
        self._weather = weather
        self._random = random
        self._last = 0.0
        self._passing: deque[tuple[float, float]] = deque()
        self._passed = 0

    def next_frame(self) -> Frame | None:
        """The next frame to write, if there is one, and a channel that is free."""
        if self.channel is None or self.free_at > self._clock.now:
            return None
        return self.outbox.next_frame(self.channel)

    def carry(self, bulk: bool) -> float:
        """Write a frame; returns when it arrives."""
        at = self._clock.now
        if bulk:
            begins, at = at, at + self.transfer
            self.free_at = at
            self._passing.append((begins + self._latency, at + self._latency))
        self._last = max(at + self.delay(), self._last)
        return self._last

    def delay(self) -> float:
        """Seconds that the next frame is under way, if it waits for no other."""
        return self._latency + self._random.random() * self._weather.jitter

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

    def lose(self) -> None:
        """Nothing that is under way arrives, unless it lingers."""
        if not self._weather.lingers or self._random.random() >= self._weather.lingers:
            self.epoch += 1
            self._passing.clear()


def _log_uniform(random: Random, least: float, most: float) -> float:
    return least if least == most else least * math.exp(random.random() * math.log(most / least))


class Network(Clock):
    """Processes by their names, the links between them, and what goes wrong with either.

    Attributes:
        random: Of the world.
        processes: By name.
        links: By (sender, receiver).
        breaks: Given how many frames were written so far, whether the next one breaks its channel.
        calm_at: When the last fault so far is over.
        written: How many frames have been written.
        delivered: How many frames with a number have been delivered.
    """

    def __init__(self, weather: Weather, random: Random) -> None:
        super().__init__()
        self.random = random
        self.processes: dict[int, Process] = {}
        self.links: dict[tuple[int, int], Link] = {}
        self.breaks: Callable[[int], bool] = lambda written: False
        self.calm_at = 0.0
        self.delivered = 0
        self.written = 0
        self._weather = weather
        self._headers = itertools.count()
        self._dials: dict[frozenset[int], int] = {}

    # ---- frames ----

    def transmit(
        self,
        sender: int,
        to: int,
        event: Callable[..., None],
        *args: Any,
        bulk: bool = False,
        beat: bytes = b"",
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have something happen to a process when a frame from another arrives.

        Args:
            sender: Who sends it.
            to: Who gets it.
            event: What happens then.
            *args: Of the event.
            bulk: Whether it has a body.
            wanted: Whether a frame with a body is to be written, should it be its turn.
            beat: Not empty for a frame without a number: takes the place of one that waits and has the same name.
        """
        link = self.links[sender, to]
        header = beat or next(self._headers).to_bytes(8, "little")
        link.contents[header] = event, args
        if beat:
            link.outbox.beats[header] = None
        elif bulk:
            link.outbox.add_bulk(b"", lambda: (header, BODY) if wanted() else None)
        else:
            link.outbox.control.append((b"", header))
        self._write(sender, to)

    def _write(self, sender: int, to: int) -> None:
        """Have a process write what it can, and go on when the link is free again."""
        link = self.links[sender, to]
        while frame := link.next_frame():
            bulk = bool(frame[1])
            arrives = link.carry(bulk)
            self.written += 1
            if self.breaks(self.written - 1):
                self.sever(sender, to)
            elif link.channel is not link.broken:
                link.under_way.append((link.epoch, frame[0]))
                self.at(arrives, self._arrive, sender, to, link)
            if bulk:
                self.at(link.free_at, self.processes[sender].happen, False, self._write, sender, to)

    def _arrive(self, sender: int, to: int, link: Link) -> None:
        if link.held_until > self.now:
            self.at(link.held_until, self._arrive, sender, to, link)
        else:
            self.processes[to].happen(False, self._deliver, sender, to, link, *link.under_way.popleft())

    def _deliver(self, sender: int, to: int, link: Link, epoch: int, header: bytes) -> None:
        # What a stopped process has not read when its connection breaks, is lost as well.
        if link.epoch != epoch:
            return
        back = self.links[to, sender]
        session = back.outbox.session
        _, number, acknowledged = decode_envelope(header)
        try:
            wanted, name = session.take(number, acknowledged), header[ENVELOPE_BYTES:]
        except FrameRefused as fault:
            raise Violation(f"{sender} to {to}: {fault}") from fault
        self.delivered += wanted and number > 0
        if wanted and name:
            event, args = link.contents[name] if number == 0 else link.contents.pop(name)
            event(*args)
        if session.acknowledges or session.behind:
            self._write(to, sender)

    def _connect(self, one: int, other: int) -> None:
        """Make the links between two processes, with a channel on which both have said hello."""
        there, back = (Link(self, self._weather, self.random) for _ in range(2))
        self.links[one, other], self.links[other, one] = there, back
        for end, hello in ((there, back.outbox.session.hello()), (back, there.outbox.session.hello())):
            end.outbox.session.greet(hello)

    # ---- channels ----

    def _reopen(self, one: int, other: int, dial: int) -> None:
        """Open a channel in place of one that broke, as soon as that is possible."""
        if self._stale(one, other, dial) or self.processes[one].dead or self.processes[other].dead:
            return
        there, back = self.links[one, other], self.links[other, one]
        if there.cuts or back.cuts:
            self.at(self.now + REDIAL_SECONDS, self._reopen, one, other, dial)
            return
        self.processes[one].happen(False, self._hail, one, other, dial)

    def _stale(self, one: int, other: int, dial: int) -> bool:
        """True if two processes have dialled again since."""
        return self._dials[frozenset((one, other))] != dial

    def _hail(self, one: int, other: int, dial: int) -> None:
        if self._stale(one, other, dial):
            return
        hello, at = self.links[one, other].outbox.session.hello(), self.now + self.links[one, other].delay()
        self.at(at, self.processes[other].happen, False, self._answer, one, other, dial, hello)

    def _answer(self, one: int, other: int, dial: int, hello: Hello) -> None:
        if self._stale(one, other, dial):
            return
        at = self.now + self.links[other, one].delay()
        if self._greet(other, one, dial, hello):
            answer = self.links[other, one].outbox.session.hello()
            self.at(at, self.processes[one].happen, False, self._greet, one, other, dial, answer)
            self.at(at, self.processes[other].happen, False, self._write, other, one)

    def _greet(self, end: int, other: int, dial: int, hello: Hello) -> bool:
        if self._stale(end, other, dial):
            return False
        link = self.links[end, other]
        if not link.outbox.session.greet(hello):
            raise Violation(f"{end} and {other} have lost their session")
        link.channel = object()
        self._write(end, other)
        return True

    def _dial(self, one: int, other: int, at: float) -> None:
        """A channel broke: have one of the two open another at some time."""
        pair = frozenset((one, other))
        dial = self._dials[pair] = self._dials.get(pair, 0) + 1
        self.at(at, self._reopen, one, other, dial)

    def _notice(self, end: int, other: int, reason: str = "connection reset") -> None:
        """A process finds out that its channel to another broke, and whether it can open another."""
        link, process = self.links[end, other], self.processes[end]
        if link.channel is link.broken:
            link.channel = None
        if self.processes[other].dead or link.cuts or self.links[other, end].cuts:
            link.outbox.drop_all_but(process.flows)
            process.lose(other, reason)

    # ---- faults ----

    def calm(self, seconds: float) -> float:
        """A fault goes on for so long; returns until when."""
        self.calm_at = max(self.calm_at, self.now + seconds)
        return self.now + seconds

    def stop(self, name: int, seconds: float, timers_first: bool = False) -> None:
        """Stop a process for a time."""
        process = self.processes[name]
        if not process.dead and not process.stopped:
            process.stop()
            self.at(self.calm(seconds), process.resume, timers_first)

    def kill(self, name: int, noticed: float | None = 0.0) -> None:
        """Kill a process.

        Args:
            name: Whose.
            noticed: Seconds until the others' connections to it break, at most; None: only its silence tells.
        """
        self.processes[name].kill()
        for sender, to in self.links:
            if sender == name and noticed is not None:
                self.at(self.calm(noticed * self.random.random()), self._died, sender, to)

    def _died(self, dead: int, other: int) -> None:
        for link in (self.links[dead, other], self.links[other, dead]):
            link.epoch += 1
            link.broken = link.channel
        self.processes[other].happen(False, self._notice, other, dead)

    def sever(self, one: int, other: int) -> None:
        """Break the channel between two processes; both are told, and open another at once."""
        at = self.now
        for sender, to in ((one, other), (other, one)):
            link = self.links[sender, to]
            link.lose()
            link.channel = None
            noticed = self.now + link.delay()
            self.at(noticed, self.processes[sender].happen, False, self._notice, sender, to)
            at = max(at, noticed)
        self._dial(one, other, at)

    def cut(self, links: Iterable[tuple[int, int]], seconds: float, noticed: float) -> None:
        """Have links lose what is under way, and carry nothing for a time.

        Args:
            links: (sender, receiver) of each.
            seconds: For how long; 0 is a channel that broke and can be opened again at once.
            noticed: Seconds until the ends of each link find out, at most.
        """
        for sender, to in links:
            if (sender, to) in self.links:
                link = self.links[sender, to]
                link.lose()
                for way in (link, self.links[to, sender]):
                    way.broken = way.channel or way.broken
                link.cuts += 1
                at = self.calm(seconds)
                self.at(at, self._heal, link)
                for end, other in ((sender, to), (to, sender)):
                    told = self.calm(noticed * self.random.random())
                    self.at(told, self.processes[end].happen, False, self._notice, end, other)
                    at = max(at, told)
                self._dial(sender, to, at)

    def _heal(self, link: Link) -> None:
        link.cuts -= 1

    def drop(self, links: Iterable[tuple[int, int]]) -> None:
        """One of two channels breaks: what is under way on links is lost, and goes by the other; nobody is told."""
        for sender, to in links:
            link = self.links.get((sender, to))
            if link is not None and link.channel is not None and link.channel is not link.broken:
                link.lose()
                link.channel = object()
                self.processes[sender].happen(False, self._write, sender, to)

    def hold(self, links: Iterable[tuple[int, int]], seconds: float) -> None:
        """Have links deliver nothing for a time, and lose nothing."""
        for link in filter(None, map(self.links.get, links)):
            link.held_until = max(link.held_until, self.calm(seconds))

    def slow(self, links: Iterable[tuple[int, int]], transfer: float) -> None:
        """From now on, have a part take so many seconds on some links."""
        for link in filter(None, map(self.links.get, links)):
            link.transfer = transfer
