"""Training scripts as processes of an end-to-end test, and what they have said."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from e2e.learner import Ended, Report, Task, Updated
from e2e.swarm import ChildProcess, DaemonProcess, Swarm

SCRIPT = Path(__file__).with_name("learner.py")

LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")

_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


class Reporting(ABC):
    """A training script that reports what it does, in a thread or in a process of its own."""

    @property
    @abstractmethod
    def reports(self) -> Sequence[Report]:
        """All reports so far."""

    @property
    def updates(self) -> list[Updated]:
        """The updates that the script has made so far."""
        return [report for report in self.reports if isinstance(report, Updated)]

    @property
    def ended(self) -> list[Ended]:
        """The script's last report of each of its runs that has ended."""
        return [report for report in self.reports if isinstance(report, Ended)]


class Learner(Reporting):
    """One started training script on the daemon of its peer."""

    def __init__(self, swarm: Swarm, daemon: DaemonProcess, task: Task) -> None:
        self.task = task
        words = [str(SCRIPT), str(daemon.home), msgspec.json.encode(task).decode()]
        self.process = ChildProcess(
            [sys.executable, *words], swarm.folder / f"learner{len(swarm.processes)}", swarm.env
        )
        swarm.processes.append(self.process)
        self.process.spawn()

    @property
    def reports(self) -> list[Report]:
        """See `Reporting`."""
        lines = self.process.output.splitlines(keepends=True)
        return [_decoder.decode(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def daemons(swarm: Swarm, count: int) -> list[DaemonProcess]:
    """`count` daemons that only this machine can reach."""
    return swarm.daemons(count, args=LISTEN)


@contextlib.contextmanager
def shared_daemons(folders: pytest.TempPathFactory, count: int) -> Iterator[list[DaemonProcess]]:
    """`count` daemons that the tests of a module share, so that each needs a run of another name."""
    swarm = Swarm(folders.mktemp("daemons"))
    try:
        yield daemons(swarm, count)
    except BaseException:
        print(swarm.logs())
        raise
    finally:
        left = swarm.close()
    assert not left, f"these processes outlived their daemons: {left}"


def start(swarm: Swarm, places: list[DaemonProcess], first: int = 0, **task: Any) -> list[Learner]:
    """A learner on each daemon, alike but for its index, which counts from `first`."""
    peers = task.pop("peers", len(places))
    return [
        Learner(swarm, daemon, Task(index=index, peers=peers, **task))
        for index, daemon in enumerate(places, first)
    ]


def shared(learners: Sequence[Reporting]) -> dict[int, set[str]]:
    """The epochs that all of them have reached in the group, and which lineages they had then."""
    told = [
        {update.epoch: update.lineage for update in learner.updates if update.contributors}
        for learner in learners
    ]
    common = set.intersection(*(set(one) for one in told))
    return {epoch: {one[epoch] for one in told} for epoch in sorted(common)}
