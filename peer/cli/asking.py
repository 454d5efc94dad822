"""The verbs that ask the daemon of a home: `status`, `peers`, `rounds`, `stop`; and `equipoise` without a verb."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from equipoise.peer.cli.output import print_headline, print_json, print_peers, print_rounds, print_status
from equipoise.peer.config import find_home
from equipoise.peer.control.client import open_link
from equipoise.peer.control.messages import Answer, AskPeers, AskRounds, AskStatus, Request, StopDaemon
from equipoise.peer.errors import EquipoiseError, NoDaemon
from equipoise.peer.history import last_of_each_run, read_history
from equipoise.peer.home import STOP_SECONDS, end_by_force, wait_until_free

ANSWER_SECONDS = 8.0
"""For each of greeting and answer: milliseconds on most machines, seconds on one that swaps. People wait for them."""

HOME = "Directory of identity, control socket and log.  [env: EQUIPOISE_HOME; default: the user's data directory]"

home_option = click.option("--home", metavar="DIR", type=click.Path(), help=HOME)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")

START = """\
  equipoise demo                        a whole swarm on this machine
  equipoise daemon                      the first of a swarm; it prints its ADDRESS
  equipoise launch --join ADDRESS -- python train.py"""


def show_here() -> None:
    """Print which daemon runs on the home and how it stands, or three lines to start."""
    home, origin = find_home(None, os.environ)
    if wait_until_free(home, 0.0):
        click.echo(f"no daemon is running on {home} ({origin}); to start:\n{START}")
        return
    print_headline(ask(None, AskStatus()))
    click.echo(f"home: {home} ({origin})\nmore: equipoise status, equipoise peers, equipoise rounds")


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
    found = ask(home, AskStatus())
    print_json(found) if as_json else print_status(found, everything)


@click.command(short_help="List the peers of the daemon's runs.")
@home_option
@json_option
def peers(home: str | None, as_json: bool) -> None:
    """List the peers of the runs that the daemon takes part in.

    A peer whose run differs (other tensors, codec, group size or version) is listed and never met.
    """
    found = ask(home, AskPeers())
    print_json(found) if as_json else print_peers(found)


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
        found = ask(home, AskRounds(limit))
    except NoDaemon:
        found = tuple(last_of_each_run(read_history(path), limit))
        if not found:
            raise
    print_json(found) if as_json else print_rounds(found)


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
    with contextlib.closing(open_link(home, ANSWER_SECONDS)) as link:
        pid = link.welcome.pid
        link.ask(StopDaemon())
    if not wait_until_free(home, STOP_SECONDS):
        hint = f"end it with: equipoise stop --force --home {home}"
        raise EquipoiseError(f"the daemon (pid {pid}) has not ended in {STOP_SECONDS:g} s", hint)
    return pid


def _force(home: Path) -> dict[str, int | bool]:
    try:
        return {"stopped": _ask_to_stop(home)}
    except EquipoiseError:
        if wait_until_free(home, 0.0):
            raise
    return {"stopped": end_by_force(home), "forced": True}


def ask(home: str | None, request: Request[Answer]) -> Answer:
    """Connect, ask, disconnect; raise NoDaemon if none runs there, and DaemonLost if it does not answer."""
    with contextlib.closing(open_link(find_home(home, os.environ)[0], ANSWER_SECONDS)) as link:
        return link.ask(request, ANSWER_SECONDS)
