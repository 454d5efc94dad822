"""A daemon that knows where in a round it stands, and springs a trap there: a fault at a point, not after a sleep.

`python -c "from e2e.chaos.trap import main; main()" daemon ...` is `equipoise daemon ...` with the two machines that
decide (matchmaking and the round) under watch. The process that sets the trap shares the page below. The trap springs
before, between or after the actions that an event asks for, so that a member can die having told some and not others.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PHASES = ("matching", "scatter", "decide", "gather", "commit", "ended")
"""Where a trap may be set, in the order of a healthy round."""

PAGE_ENV = "CHAOS_PAGE"

SET, PHASE, HOW_FAR, BETWEEN, SIGNAL, SPRUNG, SPRUNG_AT, SPRUNG_IN = range(8)
"""Fields of the page, doubles: the trap that was set, where, and what it sends; the one that sprang, and where."""

FIELDS = 8

EVENTS_AT_FIRST = 4
"""Taken for the events of a phase before a whole round was seen."""


class Page:
    """The shared page; one writer for each field."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(FIELDS * 8)
            self._memory = mmap.mmap(file.fileno(), FIELDS * 8)
        self.fields = memoryview(self._memory).cast("d")

    def arm(self, phase: str, how_far: float, between: float, signal: int) -> None:
        """Set a trap, in place of any that has not sprung.

        Args:
            phase: One of `PHASES`; it springs there, or later where the round skips that.
            how_far: 0 to 1, of the events that the phase took in the round before.
            between: 0 to 1, of the actions that the event asks for.
            signal: What the daemon sends itself; 0 for nothing.
        """
        fields = self.fields
        fields[PHASE], fields[HOW_FAR], fields[BETWEEN] = PHASES.index(phase), how_far, between
        fields[SIGNAL] = signal
        fields[SET] += 1

    def disarm(self) -> None:
        """Take back a trap that has not sprung."""
        self.fields[PHASE] = len(PHASES)

    @property
    def sprung(self) -> tuple[float, str] | None:
        """When, on the monotonic clock, and in which phase the last trap sprang; None if it has not."""
        fields = self.fields
        if fields[SPRUNG] != fields[SET]:
            return None
        return fields[SPRUNG_AT], PHASES[int(fields[SPRUNG_IN])]


class Watch:
    """Counts the events of each phase of the current round, and springs what is set on the page."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._counts = [0] * len(PHASES)
        self._before = [EVENTS_AT_FIRST] * len(PHASES)
        self._trap = -1.0
        self.current: object = None

    def begin(self, machine: object) -> None:
        """A new search for a group: the counts of the last round say what to expect of this one."""
        if self._counts[-1]:
            self._before = self._counts
        self._counts = [0] * len(PHASES)
        self._trap = self._page.fields[SET]
        self.current = machine

    def passing(self, phase: str, actions: list[Any]) -> list[Any]:
        """An event was taken in: returns its actions, with the trap among them if it is due."""
        place = PHASES.index(phase)
        self._counts[place] += 1
        return Trapped(actions, self._page, place) if self._due(place) else actions

    def _due(self, place: int) -> bool:
        fields = self._page.fields
        # Set after the round began, it is for the next: this one may be lingering.
        if not fields[SPRUNG] < fields[SET] == self._trap or place < fields[PHASE]:
            return False
        return place > fields[PHASE] or self._counts[place] > fields[HOW_FAR] * self._before[place]


class Trapped(list[Any]):
    """Actions that spring the trap when the driver comes to it."""

    def __init__(self, actions: list[Any], page: Page, place: int) -> None:
        super().__init__(actions)
        self._page = page
        self._place = place

    def __iter__(self) -> Iterator[Any]:
        left = int(self._page.fields[BETWEEN] * (len(self) + 1))
        for action in super().__iter__():
            if left == 0:
                self._spring()
            left -= 1
            yield action
        if left >= 0:
            self._spring()

    def _spring(self) -> None:
        fields = self._page.fields
        if fields[SPRUNG] == fields[SET]:
            return
        fields[SPRUNG_IN], fields[SPRUNG_AT] = self._place, time.monotonic()
        fields[SPRUNG] = fields[SET]
        if fields[SIGNAL]:
            os.kill(os.getpid(), int(fields[SIGNAL]))


def main() -> None:
    """Run the command line with both machines under watch."""
    from equipoise.averaging.allreduce.machine import AllReduce
    from equipoise.averaging.matchmaking.events import BecameReady
    from equipoise.averaging.matchmaking.machine import Matchmaking
    from equipoise.peer.cli import main as equipoise

    watch = Watch(Page(Path(os.environ[PAGE_ENV])))
    match, start, handle = Matchmaking.handle, AllReduce.start, AllReduce.handle

    def matching(machine: Matchmaking, event: Any, now: float) -> list[Any]:
        actions: list[Any] = match(machine, event, now)
        if isinstance(event, BecameReady):
            watch.begin(machine)
        return watch.passing("matching", actions) if watch.current is machine else actions

    def starting(machine: AllReduce, now: float) -> list[Any]:
        watch.current = machine
        return watch.passing(machine.phase, start(machine, now))

    def handling(machine: AllReduce, event: Any, now: float) -> list[Any]:
        actions: list[Any] = handle(machine, event, now)
        return watch.passing(machine.phase, actions) if watch.current is machine else actions

    patches: list[tuple[type, str, Callable[..., Any]]] = [
        (Matchmaking, "handle", matching),
        (AllReduce, "start", starting),
        (AllReduce, "handle", handling),
    ]
    for machine, name, watched in patches:
        setattr(machine, name, watched)
    equipoise()
