"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from equipoise.peer.config import CHANNELS, LOG_LEVELS

Command = TypeVar("Command", bound=Callable[..., Any])

_HOME = "Directory of identity, control socket and log.  [env: EQUIPOISE_HOME; default: the user's data directory]"


def home_option(command: Command) -> Command:
    """`--home DIR`."""
    return click.option("--home", metavar="DIR", type=click.Path(), help=_HOME)(command)


def json_option(command: Command) -> Command:
    """`--json`, as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


_DAEMON_OPTIONS = [
    click.option(
        "--join",
        metavar="ADDRESS",
        multiple=True,
        help="A daemon to join the swarm through. May be repeated.",
    ),
    click.option(
        "--listen",
        metavar="MULTIADDR",
        multiple=True,
        help="Where to listen, as /ip4/0.0.0.0/tcp/31337. May be repeated.  [default: port 31337 if it is free]",
    ),
    click.option(
        "--direct-listen",
        metavar="MULTIADDR",
        multiple=True,
        help="Where to listen for the direct channels of rounds.  [default: port 31338 if it is free]",
    ),
    click.option(
        "--announce",
        metavar="ADDRESS",
        multiple=True,
        help="Where others reach this machine, as /dns4/gpu.example.org/tcp/31337. May be repeated.",
    ),
    click.option(
        "--upnp/--no-upnp",
        default=None,
        help="Ask the router to forward a port.  [default: where this machine has private addresses only]",
    ),
    click.option(
        "--channel",
        type=click.Choice(CHANNELS),
        help=f"How direct channels encrypt.  [default: {CHANNELS[0]}]",
    ),
    home_option,
    click.option("--name", metavar="NAME", help="What people call this daemon.  [default: the host's name]"),
    click.option(
        "--client-mode/--no-client-mode", default=None, help="This machine cannot be dialled by others."
    ),
    click.option(
        "--relay/--no-relay",
        default=None,
        help="Relay for peers that cannot be dialled; this machine must be one that can.",
    ),
    click.option(
        "--relay-bandwidth",
        metavar="RATE",
        help="What is relayed at most, as 10MB/s or 80Mbit/s.  [default: 12.5MB/s]",
    ),
    click.option(
        "--bandwidth",
        metavar="RATE",
        help="What this machine can send, as 10MB/s or 80Mbit/s.  [default: measured]",
    ),
    click.option("--log-level", type=click.Choice(LOG_LEVELS), help="Least severe of what is logged."),
]


def daemon_options(command: Command) -> Command:
    """Everything that a daemon can be told; not given means the configuration file or the default decides."""
    for option in reversed(_DAEMON_OPTIONS):
        command = option(command)
    return command
