"""Virtual time, and the threads of simulated peers, of which exactly one runs at once.

A peer's work runs in a thread of its own until it waits for something. Then the thread whose wait ends first goes on.
Equal times go in the order in which the waits began, so a simulation depends on no lock, no processor and no chance.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from equipoise.peer.errors import EquipoiseError

MAX_QUESTIONS, QUESTIONS_SECONDS = 16, 0.01
"""Most questions of a peer to its daemon without a wait, and the virtual time that so many take. One question takes no
time, which saves a change of threads; but a loop that asks and asks gets ahead, as a real one does: otherwise
`while not pending.done()` would never end."""

STUCK_SECONDS = 3600.0
"""Most virtual seconds, beyond the longest computation so far, in which no round succeeds, no peer joins and no work
ends: then the peers that are left wait for each other for ever."""

ENDING_SECONDS = 10.0
"""Longest real time to wait for the end of a peer's thread, once the simulation is over. Only work that catches what
ends it, or computes on, takes so long."""

MAX_NAMED = 3
"""Most peers that an error names, so that it stays one line."""


class SimulationError(EquipoiseError, RuntimeError):
    """A simulation cannot go on, or a simulated peer did what only a real one can; says which, and why."""


class Killed(BaseException):
    """Ends the work of a simulated peer that was killed, or whose simulation is over, at its present wait."""


class Chance:
    """The state of the global random generators that one thread sees, as if it had a process of its own.

    numpy's generator itself is exchanged, which takes a hundredth of the time of its state.
    """

    def __init__(self, seed: int | None = None) -> None:
        """The present state, or one made of a seed."""
        self._bits: Any = get_bit_generator()
        self._plain, self._tensor = random.getstate(), torch.get_rng_state()
        if seed is not None:
            self._bits = np.random.MT19937(seed)
            self._plain = random.Random(seed).getstate()
            self._tensor = torch.Generator().manual_seed(seed).get_state()

    def keep(self) -> None:
        """Take over the present state of the generators."""
        self._plain, self._tensor = random.getstate(), torch.get_rng_state()

    def restore(self) -> None:
        """Put the generators into this state."""
        random.setstate(self._plain)
        set_bit_generator(self._bits)
        torch.set_rng_state(self._tensor)


class Worker:
    """The thread of one peer's work.

    Attributes:
        index: The peer's index.
        result: The result of its work.
        error: The error of its work.
        killed: Whether its work must end.
        over: Whether its work has ended.
        waits: Names, in words, the event that it waits for.
        ticket: Number of its waits so far.
        questions: Number of questions to its daemon since the last.
    """

    def __init__(self, index: int, work: Callable[[], Any], seed: int, ended: Callable[[], None]) -> None:
        self.index = index
        self.result: Any = None
        self.error: BaseException | None = None
        self.killed = self.over = False
        self.waits: Callable[[], str] = lambda: "its turn"
        self.ticket = self.questions = 0
        self.turn = threading.Lock()
        self.turn.acquire()
        self.chance = Chance(seed)
        self._work = work
        self._ended = ended
        self.thread = threading.Thread(target=self._run, name=f"simulated peer {index}", daemon=True)

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.killed:
                self.result = self._work()
        except Killed:
            self.result = None
        except BaseException as error:
            self.error = None if self.killed else error
        self.over = True
        self._ended()


class VirtualTime:
    """The clock of a simulation, its coming events, and the threads that wait for them.

    Attributes:
        now: Virtual seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._workers: list[Worker] = []
        self._running: Worker | None = None
        self._living = 0
        self._stuck_at = STUCK_SECONDS
        self._back = threading.Lock()
        self._back.acquire()

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Call `act` at a time, after the earlier calls for that time."""
        heapq.heappush(self._due, (max(time, self.now), next(self._order), act))

    def spawn(self, index: int, work: Callable[[], Any], seed: int) -> Worker:
        """Have a peer begin its work at once; `seed` is that of its random generators."""
        worker = Worker(index, work, seed, self._back.release)
        self._workers.append(worker)
        self._living += 1
        self._wake(worker)
        worker.thread.start()
        return worker

    def kill(self, worker: Worker) -> None:
        """End a peer's work at its present wait."""
        worker.killed = True
        self._wake(worker)

    def run(self) -> None:
        """Let time pass until the work of all peers has ended, or that of one has raised an error.

        Raises:
            SimulationError: All peers that are left wait, and nothing will end their waits.
        """
        try:
            while self._living:
                if not self._due or self._due[0][0] > self._stuck_at:
                    raise self._stuck()
                self.now, _, act = heapq.heappop(self._due)
                act()
                worker = self._running
                if worker is not None and worker.error is not None:
                    worker.error.add_note(f"raised by the work of simulated peer {worker.index}")
                    raise worker.error
        finally:
            self._end()

    def progressed(self, until: float = 0.0) -> None:
        """Note that peers get on: something has come about now, or will at `until`."""
        self._stuck_at = max(self._stuck_at, max(self.now, until) + STUCK_SECONDS)

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Let the others go on until this peer's `waker` is called and `done`, or for some seconds; returns `done`."""
        worker, end = self._worker(), self.now + seconds
        if worker.killed:
            raise Killed
        worker.questions += 1
        if worker.questions >= MAX_QUESTIONS:
            self.sleep(QUESTIONS_SECONDS)
        while not done() and self.now < end:
            self._pause(end)
        return done()

    def sleep(self, seconds: float) -> None:
        """Let the others go on for some seconds."""
        end = self.now + seconds
        while self.now < end:
            self._pause(end)

    def waker(self, waits: Callable[[], str]) -> Callable[[], None]:
        """Return a call that wakes the peer that runs now; the peer then looks whether its wait is over.

        `waits` names, in words, the event that the peer waits for.
        """
        worker = self._worker()
        worker.waits = waits
        return lambda: self._wake(worker)

    def _worker(self) -> Worker:
        worker = self._running
        if worker is None or worker.thread is not threading.current_thread():
            raise SimulationError("a simulated peer waits only in the thread of its work")
        return worker

    def _pause(self, until: float) -> None:
        """Give way until a time, or until this peer is woken."""
        worker = self._worker()
        worker.questions = 0
        if worker.killed:
            raise Killed
        if until <= self._stuck_at and not (self._due and self._due[0][0] <= until):
            self.now = until  # No other peer has anything to do before.
            return
        self._give_way(worker, until)

    def _give_way(self, worker: Worker, until: float) -> None:
        ticket = worker.ticket
        self.at(until, lambda: self._resume(worker, ticket))
        self._back.release()
        worker.turn.acquire()
        if worker.killed:
            raise Killed

    def _wake(self, worker: Worker) -> None:
        ticket = worker.ticket
        self.at(self.now, lambda: self._resume(worker, ticket))

    def _resume(self, worker: Worker, ticket: int, limit: float = -1) -> None:
        """Let a peer run until it waits again, unless it has gone on since `ticket`; at most `limit` real seconds."""
        if worker.over or worker.ticket != ticket:
            return
        worker.ticket += 1
        if self._running is not worker:
            if self._running is not None:
                self._running.chance.keep()
            worker.chance.restore()
        self._running = worker
        worker.turn.release()
        self._back.acquire(timeout=limit)
        if worker.over:
            self._living -= 1
            self.progressed()

    def _stuck(self) -> SimulationError:
        left = [worker for worker in self._workers if not worker.over]
        waits = "; ".join(f"peer {worker.index} waits for {worker.waits()}" for worker in left[:MAX_NAMED])
        more = f"; {len(left) - MAX_NAMED} others wait too" if len(left) > MAX_NAMED else ""
        return SimulationError(f"no simulated peer gets on any more: {waits}{more}")

    def _end(self) -> None:
        """End the threads that are left, one after another."""
        for worker in self._workers:
            worker.killed = True
            self._resume(worker, worker.ticket, ENDING_SECONDS)
            worker.thread.join(ENDING_SECONDS)
