"""The demo says that it worked only if it did, and why not otherwise."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import BARS, POINTS, Report, Summary, summarize, summary_lines, write_plot
from equipoise.peer.errors import EquipoiseError, FlagError

STARTED = Report(doing="trains")


def made(update: int, accuracy: float = 0.75, alone: float = 0.5) -> Report:
    return Report(doing="made", updates=update, accuracy=accuracy, alone=alone, bytes_sent=100)


def finished(digest: str = "d", accuracy: float = 0.96, alone: float = 0.92) -> Report:
    return Report(doing="has finished", updates=2, accuracy=accuracy, alone=alone, digest=digest)


GOOD = [STARTED, made(1), made(2), finished()]


def summed(*reports: Sequence[Report], killed: int = 0, problems: Sequence[str] = ()) -> Summary:
    return summarize(DemoOptions(peers=len(reports), rounds=2, kill=killed), reports, killed, problems, 10.0)


def test_a_demo_in_which_all_end_alike_worked() -> None:
    again = Report(doing="tries again", updates=1, failed=True)
    summary = summed(GOOD, GOOD, [STARTED, made(1), again, finished()])
    assert summary.ok
    assert (summary.rounds, summary.failed_rounds, summary.bytes_sent) == (2, 1, 500)
    assert (summary.equal, summary.bit_identical) == (3, True)
    assert summary.accuracy == pytest.approx(0.96)


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        (finished(digest="e"), "only 2 of 3 peers ended with the same parameters"),
        (
            finished(accuracy=0.80),
            "the swarm's accuracy is only -1.3 points above a peer alone, expected +1.0",
        ),
    ],
)
def test_a_demo_whose_peers_differ_or_gain_nothing_did_not_work(last: Report, problem: str) -> None:
    summary = summed(GOOD, GOOD, [*GOOD[:-1], last])
    assert problem in " ".join(summary.problems)
    assert not summary.ok


def test_killed_peers_do_not_count_at_the_end() -> None:
    summary = summed([STARTED, made(1)], GOOD, GOOD, killed=1)
    assert summary.ok
    assert (summary.rounds, summary.equal, summary.bit_identical, summary.killed) == (2, 2, True, 1)


@pytest.mark.parametrize("rounds", [1, 51, 10_000])
def test_a_curve_fits_into_a_line_and_shows_the_end(rounds: int) -> None:
    reports = [[made(update) for update in range(1, rounds + 1)]]
    curve = summarize(DemoOptions(rounds=rounds), reports, 0, [], 1.0).curve
    assert len(curve) <= POINTS + 1
    assert curve[-1] == (rounds, 0.75)


def test_the_summary_begins_with_its_point_and_a_picture() -> None:
    lines = list(summary_lines(summed(GOOD, GOOD, GOOD)))
    assert lines[0] == "96.0 % together, 92.0 % alone, equal bit for bit on 3 of 3"
    assert lines[1] == f"\ntogether  {BARS[4]}{BARS[6]}  test accuracy by round"
    assert lines[2].startswith(f"alone     {BARS[0]}{BARS[6]}  ")
    assert lines[-1] == "It worked."


def test_the_summary_names_what_did_not_work_and_shows_no_zeros_that_nobody_measured() -> None:
    summary = summed([STARTED, made(1)], [STARTED], problems=["peer 2 ended with status 1"])
    lines = list(summary_lines(summary))
    assert lines[-2:] == ["It did not work:", "  peer 2 ended with status 1"]
    assert not any("%" in line for line in lines)
    assert (summary.ok, summary.accuracy, summary.accuracy_alone, summary.bit_identical) == (
        False,
        None,
        None,
        False,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": 1}, "--peers from 2 to 16, got 1"),
        ({"kill": 3}, "--kill from 0 to 2"),
        ({"rule": "medium"}, "unknown rule 'medium'.*did you mean 'median'"),
        ({"outer": "fedyogi"}, "--outer needs --strategy federated, got allreduce"),
        ({"plot": "a.pdf"}, r"--plot: .* ends in .png or .svg, got 'a.pdf'"),
        ({"strategy": "federated:available=5"}, "--strategy: expected available of at most 4 peers, got 5"),
        ({"strategy": "federated:tags=gpu"}, "--strategy: the demo's peers carry no tags"),
        ({"strategy": "allreduce:quorum=4", "kill": 1}, "expected quorum of at most 3 peers, got 4"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        msgspec.convert(options, DemoOptions).check()


def test_missing_data_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EquipoiseError, match=r"pip install 'equipoise\[plots\]'"):
        DemoOptions().check()


@pytest.mark.parametrize("name", ["accuracy.svg", "accuracy.png"])
def test_the_plot_is_written(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    assert write_plot(summed(GOOD, GOOD), str(path), "a title") == f"accuracy by round: {path}"
    assert (b"<svg" if name.endswith("svg") else b"PNG") in path.read_bytes()[:1000]


def test_a_plot_that_cannot_be_drawn_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    path, summary = str(tmp_path / "missing" / "accuracy.svg"), summed(GOOD, GOOD)
    pytest.importorskip("matplotlib")
    assert write_plot(summary, path, "") == f"no plot: cannot write {path}: No such file or directory"
    monkeypatch.setattr(importlib, "import_module", missing)
    told = write_plot(summary, path, "")
    assert told == "no plot: matplotlib is missing; install it: pip install 'equipoise[plots]'"
