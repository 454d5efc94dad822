"""`equipoise status`."""

from __future__ import annotations

import click

from equipoise.peer.cli.asking import ask
from equipoise.peer.cli.options import home_option, json_option
from equipoise.peer.cli.output import print_json, print_status
from equipoise.peer.messages import AskStatus, StatusIs


@click.command()
@home_option
@click.option(
    "--all", "everything", is_flag=True, help="Also addresses, settings, versions, and every run in full."
)
@json_option
def status(home: str | None, everything: bool, as_json: bool) -> None:
    """Show what the daemon is doing, and why.

    First how it stands and what should be put right, then what became of the addresses to join through, and every run
    with where its next round stands. --json prints all of it.
    """
    found = ask(home, AskStatus(), StatusIs).status
    print_json(found) if as_json else print_status(found, everything)
