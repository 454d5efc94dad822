"""`equipoise stop`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from equipoise.peer.cli.asking import linked
from equipoise.peer.cli.options import home_option, json_option
from equipoise.peer.cli.output import print_json
from equipoise.peer.config import find_home
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.home import wait_until_free
from equipoise.peer.messages import Done, StopDaemon

STOP_SECONDS = 30.0
"""A daemon finishes or fails its open rounds first, and bounds each step of its stop."""


@click.command(short_help="Stop the daemon.")
@home_option
@click.option("--force", is_flag=True, help="End a daemon that does not answer, or does not end.")
@json_option
def stop(home: str | None, force: bool, as_json: bool) -> None:
    """Stop the daemon, after it has finished or failed its open rounds; waits until it has ended.

    With --force a daemon that does not answer, or has not ended after 30 s, is ended by SIGTERM, and by SIGKILL if that
    does not help.
    """
    path = find_home(home, os.environ)[0]
    stopped: dict[str, int | bool] = _force(path) if force else {"stopped": _ask_to_stop(path)}
    how = " by force" if "forced" in stopped else ""
    text = f"stopped the daemon (pid {stopped['stopped']}) on {path}{how}"
    print_json(stopped) if as_json else click.echo(text)


def _ask_to_stop(home: Path) -> int:
    with linked(home) as link:
        pid = link.welcome.pid
        link.ask(StopDaemon(), Done)
    if not wait_until_free(home, STOP_SECONDS):
        raise EquipoiseError(
            f"the daemon (pid {pid}) has not ended in {STOP_SECONDS:g} s",
            f"end it with: equipoise stop --force --home {home}",
        )
    return pid


def _force(home: Path) -> dict[str, int | bool]:
    from equipoise.peer.holder import end_by_force

    try:
        return {"stopped": _ask_to_stop(home)}
    except EquipoiseError:
        if wait_until_free(home, 0.0):
            raise
    return {"stopped": end_by_force(home), "forced": True}
