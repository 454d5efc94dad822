"""The program: its verbs, and how every error ends as one line and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import metadata

import click
import msgspec

from equipoise.dht.sanitize import escaped
from equipoise.peer.cli import swarms, verbs
from equipoise.peer.errors import EquipoiseError, ExitStatus, unusable

DEBUG_ENV = "EQUIPOISE_DEBUG"

INTERRUPTED = 130
"""Exit status that shells report of a program that Ctrl-C has ended."""

EPILOG = """\b
Exit status:
  0  success
  1  failure, such as a port in use, a full disk, a second daemon on one home
  2  wrong usage: the command line has to be corrected
  3  no daemon answers on the home
  5  configuration: config.toml, a variable, the home or a file in it cannot be used
  6  no network, or none of those to join could be reached
  7  refused by the daemon, or by those to join: another version, too many clients
"""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    epilog=EPILOG,
)
@click.version_option(metadata.version("equipoise"), prog_name="equipoise", message="%(prog)s %(version)s")
@click.pass_context
def equipoise(context: click.Context) -> None:
    """Average gradients and parameters among machines that train together, without a server.

    \b
    See it work:        equipoise demo
    Start a swarm:      equipoise daemon
    Join it:            equipoise daemon --join ADDRESS
    Train with it:      equipoise launch --join ADDRESS -- python train.py
    Look at it:         equipoise status
    For the invited:    equipoise swarm create NAME

    Without a command it prints what is running here.
    """
    if context.invoked_subcommand is None:
        verbs.show_here()


for verb in (verbs.demo, verbs.daemon, verbs.launch, verbs.status, verbs.peers, verbs.rounds, verbs.stop):
    equipoise.add_command(verb)
for verb in (verbs.watch, verbs.plan, swarms.swarm, swarms.join, swarms.ban, swarms.allow):
    equipoise.add_command(verb)


def main() -> None:
    """Run the command line and exit with one of `ExitStatus`, or what a launched script has ended with."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; returns the exit status, and prints an error as one line, or as JSON under `--json`."""
    try:
        result = equipoise.main(args=arguments, prog_name="equipoise", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else ExitStatus.OK
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _unwritten()
        return ExitStatus.FAILURE  # The reader has gone.
    except Exception as error:
        if os.environ.get(DEBUG_ENV):
            traceback.print_exc()
        told = _unwritten() or error
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return _complain(told, as_json="--json" in own)


def _unwritten() -> EquipoiseError | None:
    """Why what was printed cannot be written, if so; it is dropped, or the interpreter would try again as it ends."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EquipoiseError(f"cannot write to standard output: {(error.strerror or str(error)).lower()}")
    return None


def _complain(error: Exception, as_json: bool) -> int:
    """Print an error to standard error as one line, or as one JSON object; returns the exit status."""
    if isinstance(error, OSError) and not isinstance(error, EquipoiseError) and error.filename:
        error = unusable(f"use {error.filename}", error)
    kind, hint, status = type(error).__name__, "", ExitStatus.FAILURE
    text = str(error) or kind
    if isinstance(error, click.UsageError):
        hint = f"see `{error.ctx.command_path if error.ctx else 'equipoise'} --help`"
        kind, text, status = "UsageError", f"{error.format_message().rstrip('.')}; {hint}", ExitStatus.USAGE
    elif isinstance(error, click.ClickException):
        text = error.format_message()
    elif isinstance(error, EquipoiseError):
        hint, status = error.hint, error.exit_status
    elif not isinstance(error, ValueError | OSError):
        hint = f"set {DEBUG_ENV}=1 to see where"
        text = f"{kind}: {text}; {hint}"
    line = " ".join(escaped(part.strip()) for part in text.splitlines() if part.strip())
    said = {"kind": kind, "message": line, "hint": escaped(hint), "exit_status": status}
    click.echo(msgspec.json.encode({"error": said}).decode() if as_json else f"error: {line}", err=True)
    return status
