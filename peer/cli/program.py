"""The program: its verbs, and how every error ends as one line and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import metadata

import click

from equipoise.peer.cli.daemon import daemon
from equipoise.peer.cli.demo import demo
from equipoise.peer.cli.launch import launch
from equipoise.peer.cli.peers import peers
from equipoise.peer.cli.rounds import rounds
from equipoise.peer.cli.status import status
from equipoise.peer.cli.stop import stop
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.logs import escaped

DEBUG_ENV = "EQUIPOISE_DEBUG"

INTERRUPTED = 130
"""What shells report of a program that Ctrl-C has ended."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(metadata.version("equipoise"), prog_name="equipoise", message="%(prog)s %(version)s")
def equipoise() -> None:
    """Average gradients and parameters among machines that train together, without a server.

    \b
    See it work:        equipoise demo
    Start a swarm:      equipoise daemon
    Join it:            equipoise daemon --join ADDRESS
    Train with it:      equipoise launch --join ADDRESS -- python train.py
    Look at it:         equipoise status
    """


for verb in (demo, daemon, launch, status, peers, rounds, stop):
    equipoise.add_command(verb)


def main() -> None:
    """Run the command line and exit: 0 on success, 2 on wrong usage, 1 otherwise."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; returns the exit status, and prints an error as one line."""
    try:
        result = equipoise.main(args=arguments, prog_name="equipoise", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "equipoise"
        _complain(f"{error.format_message().rstrip('.')}; see `{command} --help`")
        return 2
    except click.ClickException as error:
        _complain(error.format_message())
        return 1
    except EquipoiseError as error:
        return _fail(error, error.exit_status)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; nothing more may be written, not even by the interpreter as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _fail(error, 1)


def _fail(error: Exception, status: int) -> int:
    if os.environ.get(DEBUG_ENV):
        traceback.print_exc()
    expected = isinstance(error, EquipoiseError | ValueError | OSError)
    text = str(error) or type(error).__name__
    if not expected:
        text = f"{type(error).__name__}: {text}; set {DEBUG_ENV}=1 to see where"
    _complain(text)
    return status


def _complain(text: str) -> None:
    line = " ".join(escaped(part.strip()) for part in text.splitlines() if part.strip())
    click.echo(f"error: {line}", err=True)
