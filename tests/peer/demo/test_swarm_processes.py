"""No child outlives the demo, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from e2e.swarm import eventually
from equipoise.peer.demo.swarm import Child, Family

STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
)

PARENT = """
import sys
from pathlib import Path
from equipoise.peer.demo.swarm import Family
with Family(Path(sys.argv[1])) as family:
    family.start("child", [sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()"])
    while True:
        for _, line in family.hear(30):
            print(line, flush=True)
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    with Family(tmp_path) as family:
        yield family


def python(family: Family, code: str) -> Child:
    return family.start("child", [sys.executable, "-c", code])


def hear(family: Family) -> list[str | None]:
    return eventually(lambda: [line for _, line in family.hear(0.1)], "a line")


def test_lines_come_whole_and_the_end_comes_last(family: Family) -> None:
    python(family, "import sys; sys.stdout.write('one\\ntw'); sys.stdout.flush(); print('o')")
    heard: list[str | None] = []
    while None not in heard:
        heard += hear(family)
    assert heard == ["one", "two", None]


def test_an_ending_quotes_the_last_error_line(family: Family) -> None:
    child = python(family, "raise SystemExit('no daemon here')")
    assert child.reap(30) == 1
    assert child.ending == "child ended with status 1: no daemon here"


def test_leaving_ends_a_child_that_ignores_termination(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.peer.demo.swarm.STOP_SECONDS", 0.1)
    child = python(family, STUBBORN)
    hear(family)
    family.__exit__()
    assert child.poll() is not None


def test_a_users_settings_do_not_reach_the_children(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_HOME", "elsewhere")
    python(family, "import os; print(os.environ.get('EQUIPOISE_HOME'))")
    assert hear(family)[0] == "None"


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_children_of_a_killed_parent_end_too(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    eventually(lambda: not _alive(pid), "the end of the child")


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
