"""A daemon and its trainer, who calls round after round and comes back after whatever happens to the daemon."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import psutil
import torch

from e2e.chaos.trap import PAGE_ENV, Page
from e2e.chaos.truth import Contribution, Truth
from e2e.swarm import CLI, DaemonProcess, Swarm, eventually
from equipoise.averaging.outcome import Outcome
from equipoise.peer import Client, DaemonLost, Refused, Run, connect
from equipoise.peer.status import Status

WATCHED_CLI = (*CLI[:-1], "from e2e.chaos.trap import main; main()")

TESTS = Path(__file__).resolve().parents[2]

RUN = "chaos"

REJOIN_SECONDS = 20.0
"""A daemon that was stopped may still be leaving what its last client had joined."""

COMPANY_SECONDS = 10.0
"""Longest time for which a trainer that is back waits for another peer before it calls: README's scripts wait so."""


@dataclass
class Call:
    """One `run.average` of one member, and what came of it.

    Attributes:
        contribution: What the member brought.
        timeout: Seconds.
        began: When it was called, monotonic; `ended` when it returned.
        outcome: None if the daemon was lost.
        lost: How the loss of the daemon was told.
        print: Hash of the tensor afterwards.
        faulted: What kind of fault struck its own daemon or link meanwhile, if any.
        crash: What it raised, other than that its daemon was lost.
        done: Set when it has returned.
    """

    contribution: Contribution
    timeout: float
    began: float = float("inf")
    ended: float = float("inf")
    outcome: Outcome | None = None
    lost: str = ""
    print: str = ""
    faulted: str = ""
    crash: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def ok(self) -> bool:
        """Whether the tensor should hold a mean."""
        return self.outcome is not None and self.outcome.ok

    @property
    def reason(self) -> str:
        """Why it ended so."""
        return self.outcome.reason if self.outcome is not None else self.lost


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds.

    Attributes:
        memory: Resident bytes.
        descriptors: Open file descriptors.
        threads: Threads.
        regions: Mappings of memory shared with clients.
    """

    memory: int
    descriptors: int
    threads: int
    regions: int


@dataclass
class Return:
    """A member's way back into a group: its daemon's start, and its calls until one is ok; not what lies between them.

    Attributes:
        kind: Of the fault.
        since: When it was over, monotonic: the daemon was started, woken, connected; or when its p2pd died.
        seconds: What the way has taken so far.
        starting: How much of it until the daemon was up, and its trainer had joined and met a peer.
    """

    kind: str
    since: float
    seconds: float = 0.0
    starting: float = 0.0

    def count(self, call: Call) -> None:
        """A call has returned."""
        if call.began > self.since:
            self.seconds += call.ended - call.began


class Member:
    """One daemon with a home of its own, and a trainer in a thread of this process.

    Attributes:
        available: Whether its daemon is up and it has joined the run.
        call: What it waits for.
        rounds: Ok ones of its daemon, since that was started.
        pids: Its daemon's processes, one after the other.
        born: When its daemon was started last, monotonic.
        returning: Its way back after a fault; None once it was in a group again.
    """

    def __init__(self, index: int, swarm: Swarm, truth: Truth, values: int, options: dict[str, Any]) -> None:
        self.index = index
        self.swarm = swarm
        self.tensor = torch.zeros(values)
        self.available = False
        self.call: Call | None = None
        self.rounds = 0
        self.pids: list[int] = []
        self.born = 0.0
        self.returning: Return | None = None
        self.peer_id = ""
        self._truth = truth
        self._options = options
        self._client: Client | None = None
        self._run: Run | None = None

    def create(self, join: Sequence[str], args: Sequence[str], prefix: Sequence[str] = ()) -> None:
        """Make its daemon and start it; `prefix` goes before its command."""
        path = self.swarm.folder / f"page{self.index}"
        self.page = Page(path)
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**self.swarm.env, PAGE_ENV: str(path), "PYTHONPATH": os.pathsep.join(paths)}
        self.daemon = DaemonProcess(self.swarm.folder / f"daemon{self.index}", env, join, args)
        self.daemon.command = [*prefix, *WATCHED_CLI, *self.daemon.command[len(CLI) :]]
        self.swarm.processes.append(self.daemon)
        self.start(company=0)

    def start(self, company: int = 1) -> None:
        """Start the daemon, again or for the first time, connect and join."""
        self.rounds = 0
        self.born = time.monotonic()
        self.daemon.start()
        self.pids.append(self.daemon.pid)
        self.attach(company)

    def attach(self, company: int = 1) -> None:
        """Connect to the daemon, join the run and wait for company, as a trainer does that lost its daemon."""
        self.detach()
        self._client = connect(self.daemon.home)
        assert self.peer_id in ("", self._client.peer_id), "a daemon keeps its PeerID"
        self.peer_id = self._client.peer_id
        eventually(self._joined, f"daemon {self.index} to let its trainer join", REJOIN_SECONDS)
        assert self._run is not None
        self._run.wait_for(company, COMPANY_SECONDS)
        self.available = True

    def detach(self) -> None:
        """Forget the connection."""
        self.available = False
        client, self._client, self._run = self._client, None, None
        if client is not None:
            client.close()

    def knows(self, others: int) -> bool:
        """Whether it knows so many other peers of the run."""
        assert self._run is not None
        return int(getattr(self._run.state, "peers", 0)) >= others

    def status(self) -> Status | None:
        """What its daemon says of itself; None if it does not answer."""
        try:
            return None if self._client is None else self._client.status()
        except DaemonLost:
            return None

    def prepare(self, round: int, weight: float, timeout: float) -> Call:
        """Fill the tensor for a round."""
        self._truth.fill(self.tensor, self.index, round)
        self.call = Call(Contribution(self.index, round, weight), timeout)
        return self.call

    def average(self, late: float) -> None:
        """Begin the prepared call, after `late` seconds, in a thread of its own."""
        assert self.call is not None
        threading.Thread(target=self._average, args=(self.call, late), daemon=True).start()

    def usage(self) -> Usage:
        """What its daemon holds now."""
        return usage(self.daemon.pid)

    def _average(self, call: Call, late: float) -> None:
        threading.Event().wait(late)
        call.began = time.monotonic()
        try:
            if self._run is None or self._client is None:
                call.lost = "the connection was given up"
            else:
                client, outcome = self._client, self._mean(self._run, call)
                if outcome or not client.lost:
                    call.outcome = outcome
                else:
                    call.lost = outcome.reason
            self.available = self.available and not call.lost
        except BaseException as error:
            call.crash = error
        call.ended = time.monotonic()
        call.print = blake3.blake3(memoryview(self.tensor.numpy()).cast("B")).hexdigest()
        call.done.set()

    def _mean(self, run: Run, call: Call) -> Outcome:
        """Let the tensor hold the mean, by `average`, or by `step` with a codec that `average` refuses."""
        weight = call.contribution.weight
        if not run.options.codec.startswith("sparse"):
            return run.average(weight, call.timeout)
        run.take()
        run.accumulate({"w": self.tensor}, weight)
        outcome = run.step(call.timeout)
        if outcome.ok:
            self.tensor.copy_(run.mean["w"])
        return outcome

    def _joined(self) -> bool:
        assert self._client is not None
        try:
            self._run = self._client.join(RUN, {"w": self.tensor}, **self._options)
        except Refused:
            return False
        return True


def usage(pid: int) -> Usage:
    """What a process holds now."""
    process = psutil.Process(pid)
    regions = Path(f"/proc/{pid}/maps").read_text().count("memfd:equipoise")
    return Usage(process.memory_info().rss, process.num_fds(), process.num_threads(), regions)
