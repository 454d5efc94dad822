"""`equipoise rounds`."""

from __future__ import annotations

import click

from equipoise.peer.cli.asking import ask
from equipoise.peer.cli.options import home_option, json_option
from equipoise.peer.cli.output import print_json, print_rounds
from equipoise.peer.messages import AskRounds, RoundsAre


@click.command()
@home_option
@click.option(
    "--limit", type=click.IntRange(1, 64), default=20, show_default=True, help="How many of each run."
)
@json_option
def rounds(home: str | None, limit: int, as_json: bool) -> None:
    """Show what the last rounds came to, oldest first.

    Only of runs that a script takes part in now.
    """
    found = ask(home, AskRounds(limit), RoundsAre).rounds
    print_json(found) if as_json else print_rounds(found)
