"""`equipoise` without a command: what is running here, or how to start."""

from __future__ import annotations

import os

import click

from equipoise.peer.cli.asking import ask
from equipoise.peer.cli.output import print_headline
from equipoise.peer.config import find_home
from equipoise.peer.home import wait_until_free
from equipoise.peer.messages import AskStatus, StatusIs

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
    print_headline(ask(None, AskStatus(), StatusIs).status)
    click.echo(f"home: {home} ({origin})\nmore: equipoise status, equipoise peers, equipoise rounds")
