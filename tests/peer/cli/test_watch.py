"""`watch`: one screen of a daemon and its last rounds, which q leaves."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console

from equipoise.averaging.outcome import Outcome
from equipoise.peer.cli import program, watch
from equipoise.peer.errors import NoDaemon
from equipoise.peer.status import Status
from peer.cli.test_output import a_status


def test_it_renews_the_screen_until_q_and_waits_for_a_daemon_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master, slave = pty.openpty()
    asked: list[int] = []

    def ask() -> tuple[Status, Sequence[Outcome]]:
        asked.append(len(asked))
        if asked == [0]:
            raise NoDaemon("no daemon is running here")
        os.write(master, b"q")
        return a_status(), [Outcome(ok=True, reason="mean over 4 of 4 members", run="digits", round=3)]

    monkeypatch.setattr(watch, "RENEW_SECONDS", 0.0)
    with os.fdopen(slave) as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        watch.watch(ask)
    assert asked == [0, 1] or len(asked) == 3, "q is seen at the second look at the latest"

    console = Console(width=200)
    with console.capture() as captured:
        console.print(watch.screen(ask))
    os.close(master)
    shown = captured.get()
    assert all(text in shown for text in ("gpu-box: searching", "digits-1", "mean over 4 of 4", "q leaves"))


def test_it_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run(["watch"]) == 2
    assert "watch needs a terminal" in capsys.readouterr().err
