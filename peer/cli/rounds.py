"""`equipoise rounds`."""

from __future__ import annotations

import os

import click

from equipoise.peer.cli.asking import ask
from equipoise.peer.cli.options import home_option, json_option
from equipoise.peer.cli.output import print_json, print_rounds
from equipoise.peer.config import find_home
from equipoise.peer.errors import NoDaemon
from equipoise.peer.history import last_of_each_run, read_history
from equipoise.peer.messages import AskRounds, RoundsAre


@click.command()
@home_option
@click.option(
    "--limit", type=click.IntRange(1, 64), default=20, show_default=True, help="How many of each run."
)
@json_option
def rounds(home: str | None, limit: int, as_json: bool) -> None:
    """Show how the last rounds ended, oldest first.

    The home keeps them, so those of scripts and daemons that have ended are shown too.
    """
    path = find_home(home, os.environ)[0]
    try:
        found = ask(home, AskRounds(limit), RoundsAre).rounds
    except NoDaemon:
        found = tuple(last_of_each_run(read_history(path), limit))
        if not found:
            raise
    print_json(found) if as_json else print_rounds(found)
