"""The demo's course of events, told by children that only pretend."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import Failed, Finished, Report, Stepped, Summary
from equipoise.peer.demo.swarm import DemoSwarm
from equipoise.peer.errors import EquipoiseError

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/Qm"


class FakeChild:
    """Ends when told to, with status 0 unless it was killed."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.command = name, list(command)
        self.status = 0
        self.asked = False

    @property
    def ending(self) -> str:
        return f"{self.name} ended with status {self.status}"

    def kill(self) -> None:
        self.status = -9

    def terminate(self) -> None:
        self.asked = True

    def reap(self, seconds: float) -> int:
        return self.status


class FakeFamily:
    """Daemons print an address at once; trainers say what the test has them say, in turns."""

    def __init__(self, script: dict[int, list[Report | None]]) -> None:
        self.children: list[FakeChild] = []
        self._script = {index: deque(said) for index, said in script.items()}
        self._silent: deque[FakeChild] = deque()

    def start(self, name: str, command: Sequence[str]) -> FakeChild:
        child = FakeChild(name, command)
        self.children.append(child)
        if name.startswith("daemon"):
            self._silent.append(child)
        return child

    def hear(self, seconds: float) -> Iterator[tuple[FakeChild, str | None]]:
        while self._silent:
            yield self._silent.popleft(), ADDRESS
        for child in self.trainers:
            said = self._script[int(child.name.split()[1]) - 1]
            if said:
                report = said.popleft()
                yield child, None if report is None else msgspec.json.encode(report).decode()

    @property
    def daemons(self) -> list[FakeChild]:
        return [child for child in self.children if child.name.startswith("daemon")]

    @property
    def trainers(self) -> list[FakeChild]:
        return [child for child in self.children if child.name.startswith("trainer")]


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def show(self, round_: Stepped) -> None:
        self.notes.append(f"round {round_.update}")


def stepped(update: int) -> Stepped:
    return Stepped(update=update, group=3, contributors=3, loss=1.0, bytes_sent=1, bytes_saved=3, seconds=0.1)


DONE = Finished(digest="d", accuracy=0.96, alone=0.9)

COURSE: list[Report | None] = [stepped(1), stepped(2), stepped(3), stepped(4), DONE, None]


def play(options: DemoOptions, script: dict[int, list[Report | None]]) -> tuple[Summary, FakeFamily, Notes]:
    family, notes = FakeFamily(script), Notes()
    summary = DemoSwarm(options, family, Path("folder"), notes).run()  # type: ignore[arg-type]
    return summary, family, notes


def test_all_finish_and_the_daemons_are_stopped() -> None:
    summary, family, _ = play(DemoOptions(peers=3, rounds=4), {0: COURSE, 1: COURSE, 2: COURSE})
    assert summary.ok, summary.problems
    assert summary.rounds == 4
    assert [child.asked for child in family.trainers] == 3 * [False]
    assert [child.asked for child in family.daemons] == 3 * [True]


def test_the_others_join_through_the_first_daemon() -> None:
    _, family, _ = play(DemoOptions(peers=3, rounds=4), {0: COURSE, 1: COURSE, 2: COURSE})
    first, *others = family.daemons
    assert "--join" not in first.command
    assert all(child.command[-2:] == ["--join", ADDRESS] for child in others)


def test_the_first_daemons_are_killed_half_way_and_the_others_finish() -> None:
    cut: list[Report | None] = [stepped(1), stepped(2), None]
    summary, family, notes = play(DemoOptions(peers=3, rounds=4, kill=1), {0: cut, 1: COURSE, 2: COURSE})
    assert summary.ok, summary.problems
    assert [child.status for child in family.daemons] == [-9, 0, 0]
    assert "killed daemon 1 after update 2" in notes.notes


def test_a_trainer_that_ends_early_is_a_problem() -> None:
    early: list[Report | None] = [stepped(1), None]
    summary, _, _ = play(DemoOptions(peers=3, rounds=4), {0: early, 1: COURSE, 2: COURSE})
    assert not summary.ok
    assert "trainer 1 ended with status 0" in summary.problems


def test_failed_attempts_are_shown_and_counted() -> None:
    again = [stepped(1), Failed(update=2, reason="a member was lost"), *COURSE[1:]]
    summary, _, notes = play(DemoOptions(peers=3, rounds=4), {0: again, 1: COURSE, 2: COURSE})
    assert summary.ok
    assert summary.failed_rounds == 1
    assert "trainer 1, update 2: a member was lost" in notes.notes


def test_a_swarm_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.peer.demo.options.SECONDS", 0.05)
    summary, _, _ = play(DemoOptions(peers=3, rounds=4), {0: COURSE, 1: COURSE, 2: []})
    assert "gave up after 0.05 s" in summary.problems


def test_a_daemon_that_does_not_come_up_is_named() -> None:
    family = FakeFamily({})
    family.hear = lambda seconds: iter([(family.children[0], None)])  # type: ignore[method-assign]
    with pytest.raises(EquipoiseError, match="daemon 1 ended"):
        DemoSwarm(DemoOptions(), family, Path("folder"), Notes()).run()  # type: ignore[arg-type]
