"""Federated trainings go on from checkpoints as if nothing had been, after all of them were killed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from e2e.federated_learner import Ended, Report, Task, Trains
from e2e.learners import LISTEN, daemons
from e2e.swarm import ChildProcess, DaemonProcess, Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PEERS, ROUNDS, KILLED_AT = 3, 10, 7

SCRIPT = Path(__file__).with_name("federated_learner.py")

SECONDS = 90.0
"""Far more than any condition takes."""

_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


class Learner:
    """One started training script on the daemon of its peer."""

    def __init__(self, swarm: Swarm, place: DaemonProcess, task: Task) -> None:
        words = [str(SCRIPT), str(place.home), msgspec.json.encode(task).decode()]
        log = swarm.folder / f"learner{len(swarm.processes)}"
        self.process = ChildProcess([sys.executable, *words], log, swarm.env)
        swarm.processes.append(self.process)
        self.process.spawn()

    @property
    def reports(self) -> list[Report]:
        """All reports so far."""
        lines = self.process.output.splitlines(keepends=True)
        return [_decoder.decode(line) for line in lines if line.endswith("\n")]

    @property
    def trainings(self) -> list[int]:
        """The rounds for which it has trained so far."""
        return [one.number for one in self.reports if isinstance(one, Trains)]

    def finish(self) -> Ended:
        """Wait for the script's end, whose status must be 0; returns its last report."""
        assert self.process.wait(SECONDS) == 0, self.process.errors[-4000:]
        report = self.reports[-1]
        assert isinstance(report, Ended)
        return report


def started(swarm: Swarm, places: Sequence[DaemonProcess], **task: Any) -> list[Learner]:
    made = [Task(index=index, peers=len(places), **task) for index in range(len(places))]
    return [Learner(swarm, place, one) for place, one in zip(places, made, strict=True)]


def test_all_are_killed_and_end_as_a_run_that_was_never_killed(swarm: Swarm) -> None:
    places = daemons(swarm, PEERS)
    calm = [one.finish() for one in started(swarm, places, name="calm", rounds=ROUNDS)]
    training = {"name": "killed", "rounds": ROUNDS, "checkpoints": True}
    learners = started(swarm, places, hold=KILLED_AT, **training)
    eventually(lambda: all(KILLED_AT in one.trainings for one in learners), f"round {KILLED_AT}", SECONDS)
    for process in [*(one.process for one in learners), *places]:
        process.kill()

    first = swarm.daemon(places[0].home.name, args=LISTEN)
    again = [first, *(swarm.daemon(place.home.name, [first.address], LISTEN) for place in places[1:])]
    resumed = started(swarm, again, resume=True, **training)
    ended = [one.finish() for one in resumed]

    print(f"resumed in round {min(one.trainings[0] for one in resumed)} of {ROUNDS}")
    assert all(one.trainings[0] in (KILLED_AT - 1, KILLED_AT) for one in resumed)
    assert ended == [ended[0]] * PEERS
    assert calm == [calm[0]] * PEERS
    assert ended[0].rounds == calm[0].rounds
    assert {"model", "outer", "outer step"} <= {name.partition("/")[0] for name in calm[0].parts}
    assert ended[0].parts == calm[0].parts
    assert ended[0].reason == calm[0].reason
