"""A federated demo shows who was drawn and how good the model is, and draws its course."""

from __future__ import annotations

import importlib
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from equipoise.peer.demo.display import LiveTable, PlainLines, render_summary, write_plot
from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import Finished, Ledger, Stepped, Summary

OPTIONS = DemoOptions(peers=4, rounds=2, strategy="federated:fraction=0.5", outer="fedyogi").check()


def stepped(update: int, accuracy: float | None) -> Stepped:
    return Stepped(
        update=update,
        group=4,
        contributors=2,
        loss=0.25,
        bytes_sent=1500,
        bytes_saved=-100,
        seconds=0.5,
        drawn=2,
        accuracy=accuracy,
    )


def summary_of(*rounds: Stepped, options: DemoOptions = OPTIONS) -> Summary:
    ledger = Ledger(options)
    for trainer in range(options.peers):
        for round_ in rounds:
            ledger.add(trainer, round_)
        ledger.add(trainer, Finished(digest="d", accuracy=0.75, alone=0.2))
    return ledger.summarize(frozenset(), [], 10.0)


def shown(what: Any) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        if isinstance(what, type):
            display = what(console, OPTIONS)
            with display if isinstance(display, LiveTable) else nullcontext():
                display.show(stepped(2, 0.5))
        else:
            console.print(what)
    return captured.get()


def test_the_curve_has_the_agreed_accuracies_and_that_of_the_end() -> None:
    summary = summary_of(stepped(1, 0.1), stepped(2, 0.5))
    assert summary.ok, summary.problems
    assert summary.curve == ((0, 0.1), (1, 0.5), (2, 0.75))


def test_a_round_without_an_accuracy_leaves_a_gap() -> None:
    assert summary_of(stepped(1, 0.1), stepped(2, None)).curve == ((0, 0.1), (2, 0.75))


def test_lines_tell_draw_and_accuracy() -> None:
    text = shown(PlainLines)
    assert "round 2  drawn 2  contributors 2  loss 0.250  accuracy 50.0 %  bytes 1.5 kB" in text


def test_the_table_tells_draw_and_accuracy_and_how_the_run_goes() -> None:
    text = shown(LiveTable)
    told = re.sub(r"\s+", " ", text)
    assert "4 peers, federated:fraction=0.5, mean, fedyogi, int8, 2 rounds" in told
    assert "drawn" in told
    assert "50.0 %" in told


def test_a_codec_that_saved_nothing_is_not_praised() -> None:
    assert "saved" not in shown(render_summary(summary_of(stepped(1, 0.1)), OPTIONS))


@pytest.mark.parametrize("name", ["accuracy.svg", "accuracy.png"])
def test_the_plot_is_written(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    options = DemoOptions(peers=4, rounds=2, strategy="federated", plot=str(path)).check()
    assert write_plot(summary_of(stepped(1, 0.1), options=options), options) == f"accuracy by round: {path}"
    assert (b"<svg" if name.endswith("svg") else b"PNG") in path.read_bytes()[:1000]


def test_without_matplotlib_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    told = write_plot(summary_of(stepped(1, 0.1)), OPTIONS)
    assert told == "no plot: matplotlib is missing; install it: pip install 'equipoise[demo]'"


def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "missing" / "accuracy.svg"
    options = DemoOptions(peers=4, rounds=2, strategy="federated", plot=str(path)).check()
    told = write_plot(summary_of(stepped(1, 0.1), options=options), options)
    assert told == f"no plot: cannot write {path}: No such file or directory"
