"""The verbs that start something: `daemon`, `launch`, `demo`. Each loads what it runs once its options are sound."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from equipoise.peer.cli.asking import home_option, json_option
from equipoise.peer.cli.output import print_json, print_settings
from equipoise.peer.config import CHANNELS, LOG_LEVELS, load

Command = TypeVar("Command", bound=Callable[..., Any])

_several = partial(click.option, metavar="ADDRESS", multiple=True)
_switch = partial(click.option, default=None)
_rate = partial(click.option, metavar="RATE")

_DAEMON_OPTIONS = [
    _several("--join", help="A daemon to join the swarm through. May be repeated."),
    _several(
        "--listen",
        metavar="MULTIADDR",
        help="Where to listen, as /ip4/0.0.0.0/tcp/31337. May be repeated.  [default: port 31337 if it is free]",
    ),
    _several(
        "--direct-listen",
        metavar="MULTIADDR",
        help="Where to listen for the direct channels of rounds.  [default: port 31338 if it is free]",
    ),
    _several(
        "--announce",
        help="Where others reach this machine, as /dns4/gpu.example.org/tcp/31337. May be repeated.",
    ),
    _switch(
        "--upnp/--no-upnp",
        help="Ask the router to forward a port.  [default: where this machine has private addresses only]",
    ),
    click.option(
        "--channel",
        type=click.Choice(CHANNELS),
        help=f"How direct channels encrypt.  [default: {CHANNELS[0]}]",
    ),
    home_option,
    click.option("--name", metavar="NAME", help="What people call this daemon.  [default: the host's name]"),
    _switch("--client-mode/--no-client-mode", help="This machine cannot be dialled by others."),
    _switch(
        "--relay/--no-relay",
        help="Relay for peers that cannot be dialled; this machine must be one that can.",
    ),
    _rate("--relay-bandwidth", help="What is relayed at most, as 10MB/s or 80Mbit/s.  [default: 12.5MB/s]"),
    _rate("--bandwidth", help="What this machine can send, as 10MB/s or 80Mbit/s.  [default: measured]"),
    click.option("--log-level", type=click.Choice(LOG_LEVELS), help="Least severe of what is logged."),
]


def daemon_options(command: Command) -> Command:
    """Everything that a daemon can be told; not given means the configuration file or the default decides."""
    for option in reversed(_DAEMON_OPTIONS):
        command = option(command)
    return command


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

    run_daemon(loaded)


@click.command()
@daemon_options
@click.option("--resume", is_flag=True, help="Have the script go on from the newest checkpoint of its run.")
@click.argument("command", metavar="-- COMMAND [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(command: tuple[str, ...], resume: bool, **flags: Any) -> None:
    """Run a daemon and your training script together.

    The script finds the daemon by itself: `connect()` in it needs no argument. The daemon stops when the script ends,
    and is started again if it ends before, unless by `equipoise stop`. The script's exit status is passed on, and
    signals reach it.

    \b
    equipoise launch --join ADDRESS -- python train.py --epochs 3
    equipoise launch --resume -- python train.py --epochs 3

    With --resume, a script whose optimizer writes checkpoints (`run.optimizer(..., checkpoints=Checkpoints(every=10))`)
    starts from the newest one that is sound, and catches up with the swarm if that has got further.
    """
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"cannot find the command {command[0]!r}")
    loaded = load(flags)
    from equipoise.peer.run_daemon import launch as run

    sys.exit(run(loaded, command, resume))


@click.command(short_help="Run a whole swarm on this machine.")
@click.option("--peers", default=4, show_default=True, help="Daemons, each with a trainer of its own.")
@click.option("--rounds", default=50, show_default=True, help="Updates that every trainer makes.")
@click.option(
    "--codec",
    default="",
    show_default="int8, and fp16 for gossip",
    help="How values travel: fp32, fp16, bf16 or int8.",
)
@click.option("--kill", default=0, show_default=True, metavar="K", help="SIGKILL K daemons half-way.")
@click.option(
    "--strategy", default="allreduce", show_default=True, help="Who meets whom: allreduce or gossip."
)
@json_option
def demo(peers: int, rounds: int, codec: str, kill: int, strategy: str, as_json: bool) -> None:
    """Run a whole swarm on this machine: real processes, real data, a minute or so.

    Each trainer has its own share of scikit-learn's handwritten digits. The summary compares the swarm with a peer that
    trains alone on its share. The exit status is 0 only if everything really worked.

    \b
    equipoise demo
    equipoise demo --peers 8 --codec fp32
    equipoise demo --kill 1
    equipoise demo --strategy gossip
    """
    from equipoise.peer.demo import DemoOptions, run_demo

    options = DemoOptions(peers=peers, rounds=rounds, codec=codec, kill=kill, strategy=strategy)
    sys.exit(0 if run_demo(options, json=as_json).ok else 1)
