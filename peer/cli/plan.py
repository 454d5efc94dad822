"""The verb `plan`: how long exchanges of a model take on some links, before anybody joins."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click
import psutil
from humanfriendly import format_size, format_timespan
from rich.text import Text

from equipoise.peer.cli import output, verbs
from equipoise.peer.cli.verbs import json_option
from equipoise.peer.config import bytes_per_second

if TYPE_CHECKING:
    from equipoise.averaging.advice import Exchange


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
@click.option(
    "--step", required=True, metavar="TIME", type=verbs.span, help="Of a training step, such as 1.2s."
)
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
