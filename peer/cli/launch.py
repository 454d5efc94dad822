"""`equipoise launch`."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import click

from equipoise.peer.cli.options import daemon_options
from equipoise.peer.config import load


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
    from equipoise.peer.launching import launch as run

    sys.exit(run(loaded, command, resume))
