"""What verbs print: JSON for programs, tables for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.averaging.outcome import Outcome
from equipoise.dht.state import DirectStatus, ReachStatus
from equipoise.peer.config import Setting
from equipoise.peer.logs import escaped
from equipoise.peer.status import PeerRow, RunStatus, Status

SHORT_PEER = 12
"""Last characters of a PeerID; the first ones are alike in all of them."""


def print_json(value: Any) -> None:
    """Print anything that msgspec can encode, as JSON with indentation."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_settings(settings: Sequence[Setting]) -> None:
    """Print each setting, its value and its origin."""
    rows = [(setting.key, _value(setting.value), setting.origin) for setting in settings]
    Console().print(_table(("setting", "value", "from"), rows))


def print_status(status: Status) -> None:
    """Print all of the snapshot."""
    console = Console()
    swarm = status.swarm
    _line(console, "daemon", f"{status.name}, pid {status.pid}, up {_duration(status.uptime)}")
    _line(console, "peer", status.peer_id)
    _line(console, "swarm", f"{swarm.state}: {swarm.reason}")
    for address in swarm.addresses:
        _line(console, "address", address)
    for row in swarm.bootstrap:
        _line(console, "joins through", f"{row.address} ({row.state}: {row.reason})")
    for line in _reach(swarm.reach):
        _line(console, "reached", line)
    _line(console, "connected", f"{len(swarm.connected)} peers, {status.clients} clients")
    for line in _direct(swarm.direct):
        _line(console, "direct", line)
    _line(console, "memory", f"{status.memory / 1e6:.0f} MB")
    _line(console, "holds", f"{status.tasks} tasks, {status.threads} threads, {status.files} open files")
    _line(console, "kernels", f"{status.kernels.name} ({status.kernels.reason})")
    _line(console, "versions", ", ".join(f"{name} {version}" for name, version in status.versions.items()))
    _line(console, "log", status.log)
    console.print(
        _table(("setting", "value", "from"), [(s.key, _value(s.value), s.origin) for s in status.settings])
    )
    if status.runs:
        console.print(
            _table(("run", "state", "why", "round", "ok", "values", "codec", "last"), map(_run, status.runs))
        )
        for run in status.runs:
            for line in (run.transfer, *(f"{topic}: {told}" for topic, told in sorted(run.told.items()))):
                if line:
                    _line(console, run.name, line)
    else:
        _line(console, "runs", "none: a training script joins them")


def print_peers(peers: Sequence[PeerRow]) -> None:
    """Print one line for each peer of each run, then one for each peer that says how it is reached, and why."""
    if not peers:
        Console().print("no peers: no script takes part in a run")
        return
    console = Console()
    rows = [
        (
            row.run,
            row.peer + (" (this one)" if row.me else ""),
            "other options" if not row.same_spec else "ready" if row.ready else "computing",
            str(row.round),
            f"{row.accumulated:g}",
        )
        for row in peers
    ]
    console.print(_table(("run", "peer", "state", "round", "accumulated"), rows))
    console.print()
    for peer, why in {row.peer: f"{row.reach}: {row.why}" for row in peers}.items():
        _line(console, peer[-SHORT_PEER:], why)
    for row in peers:
        if row.differs:
            _line(console, row.peer[-SHORT_PEER:], f"{row.run}: other options: {row.differs}")


def print_rounds(rounds: Sequence[Outcome]) -> None:
    """Print one line for each outcome."""
    if not rounds:
        Console().print("no rounds yet")
        return
    rows = [
        (
            outcome.run,
            str(outcome.round),
            "ok" if outcome.ok else "failed",
            f"{len(outcome.contributors)} of {len(outcome.group)}",
            f"{outcome.seconds.get('total', 0.0):.3f} s",
            f"{(outcome.bytes_sent + outcome.bytes_received) / 1e6:.2f} MB",
            outcome.digest[:8],
            outcome.reason,
        )
        for outcome in rounds
    ]
    titles = ("run", "round", "", "contributors", "took", "sent and received", "digest", "why")
    Console().print(_table(titles, rows))


def _reach(reach: ReachStatus | None) -> Iterable[str]:
    if reach is None:
        return
    yield f"{reach.state}: {reach.reason}"
    relaying = reach.relaying
    if relaying is not None:
        yield (
            f"relays for {relaying.reservations} peers, {relaying.circuits} connections now, "
            f"{relaying.bytes / 1e6:.1f} MB so far, at most {relaying.bandwidth / 1e6:g} MB/s; "
            f"{relaying.refused} requests refused"
        )


def _direct(direct: DirectStatus | None) -> Iterator[str]:
    if direct is None:
        return
    where = ", ".join(direct.listening) or "nowhere"
    yield f"{direct.channels} channels open, {direct.channel}; listens at {where}"
    if direct.refused:
        counts = ", ".join(f"{count} {why}" for why, count in sorted(direct.refused.items()))
        yield f"refused {counts}; the last: {direct.last_refusal}"


def _run(run: RunStatus) -> tuple[str, ...]:
    last = run.last
    return (
        run.name,
        type(run.state).__name__,
        run.reason,
        str(run.round),
        f"{run.rounds_ok} of {run.rounds_ok + run.rounds_failed}",
        f"{run.values:,}",
        run.codec,
        "" if last is None else last.reason,
    )


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(escaped(cell)) for cell in row))
    return table


def _line(console: Console, title: str, value: str) -> None:
    console.print(Text.assemble((f"{title:<14}", "bold"), escaped(value)), soft_wrap=True)


def _value(value: Any) -> str:
    if value is None:
        return "automatic"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _duration(seconds: float) -> str:
    return (
        time.strftime("%H:%M:%S", time.gmtime(seconds))
        if seconds < 86_400
        else f"{seconds / 86_400:.1f} days"
    )
