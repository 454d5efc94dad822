"""The demo's course of events, told by children that only pretend."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec
import pytest

from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import Report, Summary
from equipoise.peer.demo.swarm import PATIENCE_SECONDS, DemoSwarm

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/Qm"

Script = list[Report | None]


class FakeChild:
    """Ends when told to."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.command, self.status = name, list(command), 0

    @property
    def ending(self) -> str:
        return f"{self.name} ended with status {self.status}"

    def kill(self) -> None:
        self.status = -9

    def reap(self, seconds: float) -> int:
        return self.status


class FakeFamily:
    """Children say what the test has them say, in turns; nothing more comes from them afterwards."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.children: list[FakeChild] = []
        self._scripts = [deque(script) for script in scripts]

    def start(self, name: str, command: Sequence[str]) -> FakeChild:
        self.children.append(FakeChild(name, command))
        return self.children[-1]

    def hear(self, seconds: float) -> Iterator[tuple[FakeChild, str | None]]:
        for child, script in zip([*self.children], self._scripts, strict=False):
            if script:
                said = script.popleft()
                yield child, None if said is None else msgspec.json.encode(said).decode()


def made(update: int) -> Report:
    return Report(doing=f"made round {update}", updates=update, accuracy=0.5, alone=0.5)


UP = Report(doing="loads the images", address=ADDRESS)

DONE = Report(doing="has finished", updates=4, accuracy=0.96, alone=0.9, digest="d")

COURSE: Script = [UP, *map(made, range(1, 5)), DONE]


def play(options: DemoOptions, *scripts: Script) -> tuple[Summary, FakeFamily, list[str]]:
    """Each look of the demo at its clock takes a second."""
    family, notes, seconds = FakeFamily(scripts), [], count()
    clock = lambda: float(next(seconds))  # noqa: E731
    summary = DemoSwarm(options, family, Path("folder"), notes.append, clock).run()  # type: ignore[arg-type]
    return summary, family, notes


def test_all_finish_and_the_others_join_through_the_first_once_it_is_up() -> None:
    summary, family, notes = play(DemoOptions(peers=3, rounds=4), COURSE, COURSE, COURSE)
    assert summary.ok, summary.problems
    assert summary.rounds == 4
    assert [note for note in notes if "made" in note] == [f"peer 1 made round {at}" for at in range(1, 5)]
    first, *others = family.children
    assert len(others) == 2
    assert ADDRESS not in first.command
    assert all(child.command[-1] == ADDRESS for child in others)


def test_the_first_peers_are_killed_half_way_and_the_others_finish() -> None:
    # It starts a turn before the others, which have made two updates when it ends.
    cut: Script = [*COURSE[:3], Report(doing="waits", updates=2), None]
    summary, family, notes = play(DemoOptions(peers=3, rounds=4, kill=1), cut, COURSE, COURSE)
    assert summary.ok, summary.problems
    assert [child.status for child in family.children] == [-9, 0, 0]
    assert "killed 1 of 3 peers after round 2, the first among them" in notes


@pytest.mark.parametrize("script", [[None], [UP, made(1), None]])
def test_a_peer_that_ends_by_itself_is_a_problem(script: Script) -> None:
    summary, _, _ = play(DemoOptions(peers=2, rounds=4), script, [UP])
    assert summary.problems == ("peer 1 ended with status 0",)


def test_failed_attempts_are_shown_and_are_no_progress() -> None:
    again = Report(doing="tries again: a member was lost", updates=1, failed=True)
    summary, _, notes = play(DemoOptions(peers=2, rounds=4), [*COURSE[:2], again, *COURSE[2:]], COURSE)
    assert summary.ok
    assert summary.failed_rounds == 1
    assert "peer 1 tries again: a member was lost" in notes
    summary, _, _ = play(DemoOptions(peers=2, rounds=4), COURSE, [UP, *[again] * 1000])
    assert "peer 2 tries again: a member was lost" in summary.problems[0]


def test_the_demo_goes_on_as_long_as_something_happens() -> None:
    rounds = 10 * int(PATIENCE_SECONDS)
    course: Script = [UP, *map(made, range(1, rounds + 1)), DONE]
    summary, _, _ = play(DemoOptions(peers=2, rounds=rounds), course, course)
    assert summary.ok, summary.problems
    assert summary.seconds > 10 * PATIENCE_SECONDS


def test_without_any_news_the_demo_says_what_it_waits_for_and_gives_up() -> None:
    stuck: Script = [UP, Report(doing="waits for 2 other peers to join")]
    summary, _, notes = play(DemoOptions(peers=3, rounds=4), COURSE, COURSE, stuck)
    assert any(
        note.startswith("waits, no news for ") and note.endswith(": peer 3 waits for 2 other peers to join")
        for note in notes
    )
    (problem,) = summary.problems
    assert problem.startswith(
        "nothing happened for 301 s: peer 3 waits for 2 other peers to join; if the machine"
    )
    assert (summary.ok, summary.accuracy, summary.accuracy_alone, summary.equal) == (False, 0.96, 0.9, 2)
