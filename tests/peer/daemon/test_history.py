from __future__ import annotations

import csv
import io
import os
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from equipoise.averaging.outcome import Outcome
from equipoise.peer import connect
from equipoise.peer.cli import program
from equipoise.peer.config import load
from equipoise.peer.daemon import history
from equipoise.peer.daemon.history import MAX_KEPT, ROUNDS_FILE, RoundHistory, last_of_each_run, read_history
from equipoise.peer.daemon.logs import PrivateFileHandler
from equipoise.peer.embedded import DaemonThread
from fakes.daemon import FakeNetwork


def outcome(number: int, run: str = "digits") -> Outcome:
    return Outcome(
        ok=True, reason="all", run=run, round=number, started=1e9 + number, contributors={"p": 1.0}
    )


def filled(home: Path, count: int) -> None:
    kept = RoundHistory(home)
    for number in range(count):
        kept.add(outcome(number))
    kept.file.close()


def test_rounds_outlive_the_daemon(tmp_path: Path) -> None:
    filled(tmp_path, 3)

    later = RoundHistory(tmp_path)
    later.add(outcome(3))
    later.file.close()

    assert later.last(10) == read_history(tmp_path) == [outcome(number) for number in range(4)]


def test_what_was_measured_outlives_the_daemon_too(tmp_path: Path) -> None:
    measured = msgspec.structs.replace(outcome(1), metrics={"loss": 0.1}, evaluation={"f 1": 1e300})
    kept = RoundHistory(tmp_path)
    kept.add(measured)
    kept.file.close()

    assert read_history(tmp_path) == [measured]


def test_the_last_of_each_run_are_listed(tmp_path: Path) -> None:
    mixed = [outcome(1), outcome(1, "other"), outcome(2), outcome(3)]

    assert last_of_each_run(mixed, 2) == mixed[1:]


def test_number_and_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, MAX_KEPT + 10)
    assert len(read_history(tmp_path)) == MAX_KEPT

    monkeypatch.setattr(history, "MAX_FILE_BYTES", 4096)
    filled(tmp_path, 200)
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.name != f"{ROUNDS_FILE}.1") <= 4096
    assert read_history(tmp_path)[-1] == outcome(199)


@pytest.mark.parametrize("torn", [b'{"ok":tr', b"\xff\xfe", b"[" * 100_000, b'{"ok": 1}\n', b"\x00" * 1000])
def test_a_torn_file_costs_only_the_torn_line(tmp_path: Path, torn: bytes) -> None:
    filled(tmp_path, 2)
    with (tmp_path / ROUNDS_FILE).open("ab") as file:
        file.write(torn)

    later = RoundHistory(tmp_path)
    later.add(outcome(2))
    later.file.close()

    assert read_history(tmp_path) == [outcome(number) for number in range(3)]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{ROUNDS_FILE}.1")

    assert read_history(tmp_path) == []


def test_rounds_are_listed_after_their_script_and_their_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNetwork().install(monkeypatch)
    daemon = DaemonThread(load({"home": tmp_path}, {}))
    with connect(tmp_path) as client:
        client.join("digits", [torch.zeros(2)]).average(timeout=0.05)
    with connect(tmp_path) as client:
        (outcome,) = client.rounds()
        assert outcome.started > 0
    daemon.stop()

    assert program.run(["rounds", "--json", "--home", str(tmp_path)]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=list[Outcome]) == [outcome]
    assert program.run(["rounds", "--home", str(tmp_path)]) == 0
    assert "no group formed within" in capsys.readouterr().out
    assert program.run(["status", "--home", str(tmp_path)]) == 3


def test_rounds_of_a_time_are_lines_of_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = RoundHistory(tmp_path)
    for number, age in enumerate((90_000.0, 7200.0, 60.0)):
        one = msgspec.structs.replace(outcome(number), started=time.time() - age, seconds={"total": 0.5})
        kept.add(msgspec.structs.replace(one, metrics={"loss": 0.25}, bytes_sent=7, reason="of 2, all"))
    kept.file.close()

    def shown(since: str) -> list[dict[str, str]]:
        assert program.run(["rounds", "--csv", "--since", since, "--home", str(tmp_path)]) == 0
        return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    assert [len(shown(since)) for since in ("1d", "90m", "30s")] == [2, 1, 0]
    (row,) = shown("90m")
    figures = {
        name: row[name]
        for name in ("run", "round", "result", "bytes_sent", "seconds_total", "loss", "reason")
    }
    assert list(figures.values()) == ["digits", "2", "ok", "7", "0.5", "0.25", "of 2, all"]
    assert program.run(["rounds", "--since", "9w", "--home", str(tmp_path)]) == 0
    assert "keeps no rounds from before" in capsys.readouterr().err


def test_a_disk_that_fills_under_a_daemon_is_a_warning_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNetwork().install(monkeypatch)
    daemon = DaemonThread(load({"home": tmp_path}, {}))
    room = psutil.disk_usage(str(tmp_path))
    with connect(tmp_path) as client:
        assert client.status().warnings == ()
        monkeypatch.setattr(psutil, "disk_usage", lambda path: room._replace(free=0))
        (warning,) = client.status().warnings
        monkeypatch.setattr(psutil, "disk_usage", lambda path: room)
        assert client.status().warnings == ()
        trouble = property(lambda file: "cannot write it" if file.baseFilename.endswith(ROUNDS_FILE) else "")
        monkeypatch.setattr(PrivateFileHandler, "trouble", trouble)
        assert client.status().warnings == ("cannot write it",)
    daemon.stop()

    assert warning.startswith(f"the disk of {tmp_path} is full: rounds go on")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path, 3)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert program.run(["rounds", "--home", str(tmp_path)]) == 1

    assert capsys.readouterr().err == "error: cannot write to standard output: no space left on device\n"
