"""The demo's course of events, told by children that only pretend."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec
import pytest

from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import Doing, Failed, Finished, Report, Stepped, Summary
from equipoise.peer.demo.swarm import PATIENCE_SECONDS, DemoSwarm
from equipoise.peer.errors import EquipoiseError

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/Qm"


class FakeChild:
    """Ends when told to, with status 0 unless it was killed."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.command = name, list(command)
        self.status = 0

    last_words = ""

    @property
    def ending(self) -> str:
        return f"{self.name} ended with status {self.status}"

    def kill(self) -> None:
        self.status = -9

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


def stepped(update: int) -> Stepped:
    return Stepped(update=update, loss=1.0, counted=3, of=3, bytes_sent=1, seconds=0.1, accuracy=0.5)


DONE = Finished(digest="d", accuracy=0.96, alone=(0.9,))

COURSE: list[Report | None] = [stepped(1), stepped(2), stepped(3), stepped(4), DONE, None]


def play(
    options: DemoOptions, script: dict[int, list[Report | None]]
) -> tuple[Summary, FakeFamily, list[str]]:
    """Each look of the demo at its clock takes a second."""
    family, notes, seconds = FakeFamily(script), [], count()
    clock = lambda: float(next(seconds))  # noqa: E731
    summary = DemoSwarm(options, family, Path("folder"), notes.append, clock).run()  # type: ignore[arg-type]
    return summary, family, notes


def test_all_finish_and_each_update_is_told_once() -> None:
    summary, _, notes = play(DemoOptions(peers=3, rounds=4), {0: COURSE, 1: COURSE, 2: COURSE})
    assert summary.ok, summary.problems
    assert summary.rounds == 4
    assert [note.split("  ")[0] for note in notes if note.startswith("round")] == [
        f"round {update}" for update in range(1, 5)
    ]


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
    assert "killed 1 of 3 daemons after round 2, the first among them" in notes


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
    assert "trainer 1, round 2: a member was lost" in notes


def test_it_waits_as_long_as_something_happens() -> None:
    rounds = 10 * int(PATIENCE_SECONDS)
    course: list[Report | None] = [*(stepped(update) for update in range(1, rounds + 1)), DONE, None]
    summary, _, _ = play(DemoOptions(peers=2, rounds=rounds), {0: [*course], 1: [*course]})
    assert summary.ok, summary.problems
    assert summary.seconds > 10 * PATIENCE_SECONDS


@pytest.mark.parametrize("last", [[], [Failed(update=1, reason="no group within 30 s")] * 1000])
def test_without_any_progress_it_says_what_it_waits_for_and_gives_up(last: list[Report | None]) -> None:
    stuck: list[Report | None] = [Doing(what="waits for 2 others to join"), *last]
    summary, _, notes = play(DemoOptions(peers=3, rounds=4), {0: COURSE, 1: COURSE, 2: stuck})
    assert "waits, no news for 11 s: trainer 3 waits for 2 others to join" in notes
    assert not summary.ok
    told, missing = summary.problems
    assert told.startswith(
        "nothing happened for 301 s: trainer 3 waits for 2 others to join; if the machine is busy,"
    )
    assert missing == "trainer 3 made 0 of 4 updates"
    assert (summary.accuracy, summary.accuracy_alone, summary.equal) == (0.96, 0.9, 2)


def test_a_daemon_that_does_not_come_up_is_named() -> None:
    family = FakeFamily({})
    family.hear = lambda seconds: iter([(family.children[0], None)])  # type: ignore[method-assign]
    with pytest.raises(EquipoiseError, match="daemon 1 ended"):
        DemoSwarm(DemoOptions(), family, Path("folder"), print).run()  # type: ignore[arg-type]
