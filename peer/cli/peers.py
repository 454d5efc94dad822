"""`equipoise peers`."""

from __future__ import annotations

import click

from equipoise.peer.cli.asking import ask
from equipoise.peer.cli.options import home_option, json_option
from equipoise.peer.cli.output import print_json, print_peers
from equipoise.peer.messages import AskPeers, PeersAre


@click.command(short_help="List the peers of the daemon's runs.")
@home_option
@json_option
def peers(home: str | None, as_json: bool) -> None:
    """List the peers of the runs that the daemon takes part in.

    A peer whose run differs (other tensors, codec, group size or version) is listed and never met.
    """
    found = ask(home, AskPeers(), PeersAre).peers
    print_json(found) if as_json else print_peers(found)
