"""The verbs: `status`, `peers`, `rounds` and `stop` ask the daemon of a home; `daemon`, `launch` and `demo` start one.

`watch` asks again and again; `plan` asks nobody.

A verb loads the libraries of a daemon or the demo once its options are sound.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import psutil
from humanfriendly import InvalidTimespan, format_size, format_timespan, parse_timespan
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from equipoise.averaging.outcome import Outcome
from equipoise.peer.cli import output
from equipoise.peer.config import (
    BOOLEANS,
    CHOICES,
    HELP,
    KEYS,
    LISTS,
    RATES,
    TYPES,
    bytes_per_second,
    find_home,
    flag_of,
    load,
)
from equipoise.peer.control.client import open_link
from equipoise.peer.control.messages import Answer, AskPeers, AskRounds, AskStatus, Request, StopDaemon
from equipoise.peer.daemon import run_daemon
from equipoise.peer.daemon.history import last_of_each_run, read_history
from equipoise.peer.errors import EquipoiseError, NoDaemon
from equipoise.peer.home import STOP_SECONDS, end_by_force, wait_until_free
from equipoise.peer.status import Status

if TYPE_CHECKING:
    from equipoise.averaging.advice import Exchange

Command = TypeVar("Command", bound=Callable[..., Any])

ANSWER_SECONDS = 8.0
"""Time for each of greeting and answer: milliseconds on most machines, seconds on one that swaps. People wait."""

HOME = "Directory of identity, control socket and log.  [env: EQUIPOISE_HOME; default: the user's data directory]"


def span(text: str) -> float:
    """Read a time span, as 1.2s, 300ms or 1d, in seconds."""
    try:
        return float(parse_timespan(text))
    except InvalidTimespan:
        raise click.BadParameter(f"expected a time such as 1.2s, 300ms or 1d, got {text!r}") from None


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
    output.print_lines(output.headline(ask(None, AskStatus())))
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
    output.print_json(found) if as_json else output.print_status(found, everything)


@click.command(short_help="List the peers of the daemon's runs.")
@home_option
@json_option
def peers(home: str | None, as_json: bool) -> None:
    """List the peers of the runs that the daemon takes part in.

    A peer whose run differs (other tensors, codec, group size or version) is listed and never met.
    """
    found = ask(home, AskPeers())
    output.print_json(found) if as_json else output.print_peers(found)


@click.command()
@home_option
@click.option(
    "--limit", type=click.IntRange(1, 64), default=20, show_default=True, help="How many of each run."
)
@click.option(
    "--since", metavar="DURATION", type=span, help="All that the home keeps of the last 1d, 90m or 30s."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print a line of figures for each round.")
@json_option
def rounds(home: str | None, limit: int, since: float | None, as_csv: bool, as_json: bool) -> None:
    """Show how the last rounds ended, oldest first.

    The home keeps them, so those of scripts and daemons that have ended are shown too.
    """
    path = find_home(home, os.environ)[0]
    if since is None:
        try:
            found = ask(home, AskRounds(limit))
        except NoDaemon:
            found = tuple(last_of_each_run(read_history(path), limit))
            if not found:
                raise
    else:
        kept, begin = read_history(path, sys.maxsize), time.time() - since
        found = tuple(one for one in kept if one.started >= begin)
        if len(found) == len(kept) and kept:
            began = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept[0].started))
            click.echo(f"the home keeps no rounds from before {began}", err=True)
    if as_csv:
        output.print_csv(found)
        return
    output.print_json(found) if as_json else output.print_rounds(found)


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
    output.print_json(stopped) if as_json else click.echo(text)


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


METAVARS = {
    "join": "ADDRESS",
    "tags": "WORD",
    "name": "NAME",
    "swarm": "NAME",
    "invite": "LINE",
    "device": "DEVICE",
    "metrics": "HOST:PORT",
    **dict.fromkeys(RATES, "RATE"),
}
"""Kinds of values of the daemon's options; all others are multiaddresses."""


def daemon_options(command: Command) -> Command:
    """Everything that a daemon can be told; not given means the configuration file or the default decides."""
    for key in reversed(KEYS):
        flag, choices, (what, *default) = f"--{flag_of(key)}", CHOICES.get(key), HELP[key].partition("[")
        if TYPES[key] in BOOLEANS:
            option = click.option(f"{flag}/--no{flag[1:]}", key, default=None, help=HELP[key])
        elif choices is not None:
            option = click.option(flag, key, type=click.Choice(choices), help=HELP[key])
        else:
            several, metavar = TYPES[key] in LISTS, METAVARS.get(key, "MULTIADDR")
            told = "".join((what, " May be repeated. " if several else "", *default))
            option = click.option(flag, key, metavar=metavar, multiple=several, help=told)
        command = option(command)
    return home_option(command)


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
        shown = loaded.settings
        output.print_json(shown) if as_json else output.print_lines(output.settings_lines(shown))
        return
    run_daemon.run_daemon(loaded)


class _Launch(click.Command):
    """Says that `--` is missing, where an option of the script was taken for one of the daemon's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        separated = "--" in args
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if separated:
                raise
            hint = "put -- before the script's command, as in: equipoise launch --resume -- python train.py"
            raise click.UsageError(f"{error.format_message().rstrip('.')}: {hint}", ctx) from error


@click.command(cls=_Launch)
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
    sys.exit(run_daemon.launch(loaded, command, resume))


@click.command(short_help="Run a whole swarm on this machine.")
@click.option(
    "--peers", default=4, show_default=True, help="Processes, each with a daemon and a training loop."
)
@click.option("--rounds", default=50, show_default=True, help="Updates that every peer makes.")
@click.option(
    "--codec",
    default=None,
    show_default="int8, and fp16 for gossip",
    help="How values travel: fp32, fp16, bf16, int8 or nf4.",
)
@click.option("--kill", default=0, show_default=True, metavar="K", help="SIGKILL K peers half-way.")
@click.option(
    "--strategy",
    default="allreduce",
    show_default=True,
    help="Who meets whom: allreduce, gossip or federated, with options as in federated:fraction=0.5.",
)
@click.option(
    "--rule",
    default="mean",
    show_default=True,
    help="Rule that makes one vector of the contributions: mean, median or trimmed.",
)
@click.option(
    "--outer",
    default="average",
    show_default=True,
    help="Outer step of federated rounds: fedavgm, fedadagrad, fedadam or fedyogi, as in fedyogi:eta=0.03.",
)
@click.option(
    "--split",
    default="iid",
    show_default=True,
    help="How the images are dealt: iid, dirichlet:alpha=0.3 or classes:each=2.",
)
@click.option("--plot", default="", metavar="FILE", help="PNG or SVG for the accuracy by round.")
@json_option
def demo(as_json: bool, **options: Any) -> None:
    """Run a whole swarm on this machine: real processes, real data, half a minute on two idle cores.

    Each peer has its own share of scikit-learn's handwritten digits. The summary compares the swarm with a peer that
    trains alone on its share. The exit status is 0 only if everything really worked. The demo waits for as long as
    something happens, and says what it waits for.

    \b
    equipoise demo
    equipoise demo --peers 8 --codec fp32
    equipoise demo --kill 1
    equipoise demo --strategy gossip
    equipoise demo --strategy federated:fraction=0.5 --split classes:each=5

    In federated rounds the drawn peers train by themselves, and all make the same step with the mean of their models.
    """
    from equipoise.peer.demo.options import DemoOptions
    from equipoise.peer.demo.swarm import run_demo

    # SIGTERM unwinds the stack as Ctrl-C does, so that every process is ended.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(0 if run_demo(DemoOptions(**options), json=as_json).ok else 1)


_COUNT = re.compile(r"(?P<amount>\d+(\.\d*)?)(?P<unit>[kKMBT]?)")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _parameters(text: str) -> int:
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"expected a number such as 350M or 1B, got {text!r}")
    return round(float(found["amount"]) * _UNITS[found["unit"]])


def _rate(text: str) -> float:
    try:
        return bytes_per_second(text)
    except ValueError:
        raise click.BadParameter(f"expected a rate such as 20Mbit or 2.5MB/s, got {text!r}") from None


@click.command(short_help="Tell how long exchanges of a model take on some links.")
@click.option(
    "--parameters", required=True, metavar="N", type=_parameters, help="Of the model, such as 350M or 1B."
)
@click.option("--peers", required=True, metavar="N", type=click.IntRange(2), help="That meet in a group.")
@click.option("--up", required=True, metavar="RATE", type=_rate, help="What a peer sends, such as 20Mbit.")
@click.option(
    "--down", required=True, metavar="RATE", type=_rate, help="What a peer receives, such as 100Mbit."
)
@click.option("--step", required=True, metavar="TIME", type=span, help="Of a training step, such as 1.2s.")
@click.option("--codec", metavar="SPEC", help="One codec; without it, several are compared.")
@click.option("--every", default=1, show_default=True, metavar="N", help="Steps between two exchanges.")
@json_option
def plan(
    parameters: int,
    peers: int,
    up: float,
    down: float,
    step: float,
    codec: str | None,
    every: int,
    as_json: bool,
) -> None:
    """Tell how long exchanges of a model take on some links, by codec, and how often they pay.

    All peers have the same link. The last column says how many steps should lie between two exchanges, so that peers
    compute for 95 % of the time.

    \b
    equipoise plan --parameters 1B --peers 8 --up 20Mbit --down 100Mbit --step 1.2s
    """
    from equipoise.averaging import advice

    free, codecs = float(psutil.virtual_memory().available), (codec,) if codec else advice.CODECS
    found = advice.plan(parameters, peers, up, down, step, codecs, every, free)
    if as_json:
        output.print_json(found)
        return
    titles = ("codec", "sends", "receives", "exchange", f"of the time, every={every}", "every, for 5 %")
    problems = [Text(f"{one.codec} does not fit: {one.problem}") for one in found if one.problem]
    output.print_lines([output.table(titles, map(_row, found)), *problems])


def _row(one: Exchange) -> tuple[str, ...]:
    sizes = (format_size(one.sent), format_size(one.received))
    took = f"{one.seconds:.2g} s" if one.seconds < 10 else format_timespan(round(one.seconds))
    return one.codec, *sizes, took, f"{one.share:.0%}", str(one.every)


RENEW_SECONDS = 1.0

SHOWN_ROUNDS = 8
"""Rounds of each run that it shows: as many fit one screen beside `status`."""


@click.command()
@home_option
def watch(home: str | None) -> None:
    """Renew `status` and the last rounds in place, on a terminal, until q."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("watch needs a terminal: use status and rounds elsewhere")
    renew(lambda: (ask(home, AskStatus()), ask(home, AskRounds(SHOWN_ROUNDS))))


def renew(look: Callable[[], tuple[Status, Sequence[Outcome]]]) -> None:
    """Show what `look` returns, again and again, until q is pressed; a daemon that is away is waited for."""
    with _keys(), Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(look), refresh=True)
            if select.select([sys.stdin], [], [], RENEW_SECONDS)[0]:
                keys = os.read(sys.stdin.fileno(), 64)
                if not keys or b"q" in keys.lower():
                    return


def screen(look: Callable[[], tuple[Status, Sequence[Outcome]]]) -> Group:
    """One screen: the daemon, its runs and the last rounds; or the reason why the daemon does not answer."""
    leave = Text("q leaves", style="dim")
    try:
        status, rounds = look()
    except EquipoiseError as error:
        return Group(Text(str(error)), Text(), leave)
    parts: list[RenderableType] = [*output.overview(status), Text()]
    if rounds:
        parts += [output.rounds_table(rounds, one_line=True), Text()]
    return Group(*parts, leave)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Have keys come one by one, without an echo."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
