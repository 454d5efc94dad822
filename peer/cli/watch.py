"""The verb `watch`: `status` and the last rounds, renewed in place until q."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from equipoise.averaging.outcome import Outcome
from equipoise.peer.cli import output
from equipoise.peer.cli.verbs import ask, home_option
from equipoise.peer.control.messages import AskRounds, AskStatus
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.status import Status

RENEW_SECONDS = 1.0

SHOWN_ROUNDS = 8
"""Rounds of each run that it shows: as many fit one screen beside `status`."""


@click.command()
@home_option
def watch(home: str | None) -> None:
    """Renew `status` and the last rounds in place, on a terminal, until q."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("watch needs a terminal: use status and rounds elsewhere")
    renew(lambda: (ask(home, AskStatus()), ask(home, AskRounds(SHOWN_ROUNDS))))


def renew(look: Callable[[], tuple[Status, Sequence[Outcome]]]) -> None:
    """Show what `look` returns, again and again, until q is pressed; a daemon that is away is waited for."""
    with _keys(), Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(look), refresh=True)
            if select.select([sys.stdin], [], [], RENEW_SECONDS)[0]:
                keys = os.read(sys.stdin.fileno(), 64)
                if not keys or b"q" in keys.lower():
                    return


def screen(look: Callable[[], tuple[Status, Sequence[Outcome]]]) -> Group:
    """One screen: the daemon, its runs and the last rounds; or the reason why the daemon does not answer."""
    leave = Text("q leaves", style="dim")
    try:
        status, rounds = look()
    except EquipoiseError as error:
        return Group(Text(str(error)), Text(), leave)
    parts: list[RenderableType] = [*output.overview(status), Text()]
    if rounds:
        parts += [output.rounds_table(rounds, one_line=True), Text()]
    return Group(*parts, leave)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Have keys come one by one, without an echo."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
