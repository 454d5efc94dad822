"""The line that a script shows on a terminal while it trains."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from equipoise.averaging.outcome import Outcome
from equipoise.peer.training import progress
from equipoise.peer.training.progress import ERASE, PAUSE_SECONDS, ProgressLine

LAST = Outcome(ok=True, reason="", group=("a", "b", "c"), seconds={"total": 0.314})


class Terminal(io.StringIO):
    """A terminal of 60 columns."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal, factory = Terminal(), logging.getLogRecordFactory()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((60, 20)))
    progress._clear_before_logging.cache_clear()
    yield terminal
    logging.setLogRecordFactory(factory)
    progress._clear_before_logging.cache_clear()


def test_the_line_is_renewed_at_most_a_few_times_a_second(terminal: Terminal) -> None:
    now = [0.0]
    line = ProgressLine("digits", lambda: now[0])

    for _ in range(100):
        line.show(7, "50 % of the batch", LAST)
        now[0] += PAUSE_SECONDS / 4

    first, *others = terminal.getvalue().split(ERASE)[1:]
    assert first == "run digits: epoch 7, 50 % of the batch, 3 peers, last round\r"
    assert len(others) == 24
    line.clear()
    line.clear()
    assert terminal.getvalue().endswith(f"\r{ERASE}")
    assert terminal.getvalue().count(ERASE) == 26


def test_what_is_logged_has_a_line_of_its_own(terminal: Terminal) -> None:
    line = ProgressLine("digits", lambda: 0.0)
    line.show(7, "step 3 of 50", None)

    logging.getLogger("equipoise.test").warning("a warning")
    assert terminal.getvalue() == f"{ERASE}run digits: epoch 7, step 3 of 50\r{ERASE}"
    line.show(7, "step 4 of 50", Outcome(ok=False, reason="alone"))

    assert terminal.getvalue().endswith(f"{ERASE}run digits: epoch 7, step 4 of 50, last round: alone\r")


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_nothing_is_shown_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))

    line = ProgressLine("digits")
    line.show(7, "step 3 of 50", LAST)
    line.clear()

    assert stream is None or stream.getvalue() == ""
    closed = Terminal()
    closed.close()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=closed))
    ProgressLine("digits").show(7, "step 3 of 50", LAST)
