"""`equipoise stop`."""

from __future__ import annotations

import os

import click

from equipoise.peer.cli.options import home_option, json_option
from equipoise.peer.cli.output import print_json
from equipoise.peer.config import find_home
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.home import wait_until_free
from equipoise.peer.link import open_link
from equipoise.peer.messages import Done, StopDaemon

STOP_SECONDS = 30.0
"""A daemon finishes or fails its open rounds first, and bounds each step of its stop."""


@click.command(short_help="Stop the daemon.")
@home_option
@json_option
def stop(home: str | None, as_json: bool) -> None:
    """Stop the daemon, after it has finished or failed its open rounds; waits until it has ended."""
    path = find_home(home, os.environ)[0]
    link = open_link(path)
    pid = link.welcome.pid
    link.ask(StopDaemon(), Done)
    link.close()
    if not wait_until_free(path, STOP_SECONDS):
        raise EquipoiseError(
            f"the daemon (pid {pid}) has not ended in {STOP_SECONDS:g} s", f"end it with: kill {pid}"
        )
    print_json({"stopped": pid}) if as_json else click.echo(f"stopped the daemon (pid {pid}) on {path}")
