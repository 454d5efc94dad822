"""`equipoise status`."""

from __future__ import annotations

import click

from equipoise.peer.cli.asking import ask
from equipoise.peer.cli.options import home_option, json_option
from equipoise.peer.cli.output import print_json, print_status
from equipoise.peer.messages import AskStatus, StatusIs


@click.command()
@home_option
@json_option
def status(home: str | None, as_json: bool) -> None:
    """Show what the daemon is doing, and why.

    The swarm's state and what became of each address to join through; every run with where its next round stands; the
    settings with their origins.
    """
    found = ask(home, AskStatus(), StatusIs).status
    print_json(found) if as_json else print_status(found)
