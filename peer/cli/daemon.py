"""`equipoise daemon`."""

from __future__ import annotations

import sys
from typing import Any

import click

from equipoise.peer.cli.options import daemon_options, json_option
from equipoise.peer.cli.output import print_json, print_settings
from equipoise.peer.config import load


@click.command()
@daemon_options
@click.option("--show-config", is_flag=True, help="Print each setting and where it came from, and exit.")
@json_option
def daemon(show_config: bool, as_json: bool, **flags: Any) -> None:
    """Run one daemon in the foreground.

    It prints its addresses, one a line, in the form that --join takes, then each change of its state. One daemon runs
    per home. Ctrl-C stops it after an open round; a second Ctrl-C at once. A daemon that was told whom to join and ends
    without having met another peer exits with 6, or 7 if the others are of another version.

    \b
    The first of a swarm:   equipoise daemon
    Every other:            equipoise daemon --join /ip4/192.0.2.7/tcp/31337/p2p/12D3...
    A second one here:      equipoise daemon --home /tmp/second --join ADDRESS

    Settings come from config.toml in the home, then EQUIPOISE_JOIN, EQUIPOISE_NAME, ..., then these flags.
    """
    loaded = load(flags)
    if show_config:
        print_json(loaded.settings) if as_json else print_settings(loaded.settings)
        return
    from equipoise.peer.run_daemon import run_daemon

    sys.exit(run_daemon(loaded))
