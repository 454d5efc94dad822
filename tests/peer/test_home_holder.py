"""Daemons that hang: what is said of them, and how they are ended; never another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from e2e.swarm import eventually
from equipoise.peer.cli import program, verbs
from equipoise.peer.errors import EquipoiseError, NoDaemon
from equipoise.peer.home import PID_FILE, Home, end_by_force, find_holder, wait_until_free

CODE = """
import pathlib, signal, sys
from equipoise.peer.home import Home
home = Home.take(pathlib.Path(sys.argv[1]))
listener = home.listen()
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)
print("up", flush=True)
while True:
    signal.pause()
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def hang(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a process that has taken the home, and answers nothing."""
    monkeypatch.setattr(verbs, "ANSWER_SECONDS", 0.2)
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen([sys.executable, "-c", CODE, str(home), *words], stdout=subprocess.PIPE)
        )
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_its_pid_and_what_to_do_are_said(hang: Start, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = hang()
    end = f"end it with: equipoise stop --force --home {home}"
    for verb in ("status", "peers", "rounds", "stop"):
        assert program.run([verb, "--home", str(home)]) == 3
        said = f"error: the daemon (pid {process.pid}) on {home} has not answered for 0.2 s"
        assert capsys.readouterr().err == f"{said}; wait if this machine is busy, or {end}\n"

    process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the stop")
    assert program.run(["status", "--home", str(home)]) == 3
    resume = f"it is stopped; have it go on with: kill -CONT {process.pid}, or {end}"
    assert capsys.readouterr().err == f"{said}: {resume}\n"


def test_stop_by_force_ends_a_stopped_daemon(
    hang: Start, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = hang()
    process.send_signal(signal.SIGSTOP)

    assert program.run(["stop", "--force", "--home", str(home), "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == {"stopped": process.pid, "forced": True}
    assert process.wait(60) == -signal.SIGTERM


def test_a_daemon_that_is_deaf_to_signals_is_killed(
    hang: Start, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.peer.home.TERM_SECONDS", 0.1)
    process = hang("deaf")

    assert end_by_force(home) == process.pid
    assert process.wait(60) == -signal.SIGKILL
    assert wait_until_free(home, 0.0)


def test_a_daemon_that_answers_and_does_not_end_is_ended(
    hang: Start, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = hang()
    monkeypatch.setattr(verbs, "_ask_to_stop", lambda home: not_ended(home, process.pid))

    assert program.run(["stop", "--force", "--home", str(home)]) == 0
    assert process.wait(60) == -signal.SIGTERM


def not_ended(home: Path, pid: int) -> int:
    raise EquipoiseError(f"the daemon (pid {pid}) on {home} has not ended")


def test_another_process_whose_number_is_in_the_file_is_never_touched(hang: Start, home: Path) -> None:
    hang()
    for other in (os.getpid(), os.getppid(), 2**22 + 1):
        (home / PID_FILE).write_text(f"{other}\n")
        assert find_holder(home) is None
        with pytest.raises(
            EquipoiseError, match=f"cannot tell which process runs on {home}; see which one has"
        ):
            end_by_force(home)
    assert not wait_until_free(home, 0.0)


def test_where_no_daemon_runs_nothing_is_ended(home: Path) -> None:
    Home.take(home).release()
    assert (home / PID_FILE).read_text() == f"{os.getpid()}\n"

    with pytest.raises(NoDaemon):
        end_by_force(home)
    assert program.run(["stop", "--force", "--home", str(home)]) == 3
