"""The output of verbs: JSON for programs, lines and tables for people.

Where standard output is a terminal, prose is wrapped between words and identifiers are never folded. Elsewhere nothing
is folded or cut. PeerIDs are shortened to their last characters; JSON has them in full.
"""

from __future__ import annotations

import csv
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from humanfriendly import format_size
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from equipoise.averaging.counts import count
from equipoise.averaging.outcome import SHOWN_CHARS, Outcome
from equipoise.dht.sanitize import escaped
from equipoise.dht.state import BootstrapStatus, DirectStatus, ReachStatus
from equipoise.peer.config import RATES, Setting
from equipoise.peer.status import Exchanges, PeerRow, RunStatus, Status

WIDE = 100_000
"""Columns where standard output is no terminal: no line is as long, so nothing is folded."""

SHOWN_RUNS = 4
SHOWN_ENTRIES = 2
SHOWN_WARNINGS = 3
"""Most rows of each kind that `status` shows without `--all`, so that all kinds fit one screen."""

SHOWN_PEERS = 3
"""Most drawn peers that `status` names without `--all`, and as many that have contributed: they fit one line."""

SHOWN_WEIGHTS = 4
"""Most weights that a row of `rounds` lists; of more it tells the least and the greatest."""

SHOWN_METRICS = 4
"""Most metrics of one kind that a row of `rounds` lists; of more it tells how many there are."""

TODAY_SECONDS = 20 * 3600.0
"""Age from which a round is shown with its date: the time of day alone would be ambiguous."""

_BASE58 = "[1-9A-HJ-NP-Za-km-z]"
_PEER_ID = re.compile(f"12D3KooW{_BASE58}{{{44 - SHOWN_CHARS}}}({_BASE58}{{{SHOWN_CHARS}}})")


def print_json(value: Any) -> None:
    """Print anything that msgspec can encode, as JSON with indentation."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_status(status: Status, everything: bool = False) -> None:
    """Print the daemon's state and its reasons, on one screen, or all of the snapshot."""
    print_lines(_details(status) if everything else overview(status), one_screen=not everything)


def print_peers(peers: Sequence[PeerRow]) -> None:
    """Print one line for each peer of each run, then for each peer the way by which it is reached, and its tags."""
    if not peers:
        print_lines([Text("no peers: no script takes part in a run")])
        return
    rows = []
    for row in peers:
        name = (row.name or "-") + (" (this one)" if row.me else "")
        state = "other options" if not row.same_spec else "ready" if row.ready else "computing"
        state = "banned" if row.banned else state
        rows.append((name, _short(row.peer), row.run, state, str(row.round), f"{row.accumulated:g}"))
    titles = ("name", "peer", "run", "state", "round", "accumulated")
    once = {row.peer: row for row in peers}.values()
    told = [(row, f"{row.reach}: {row.why}") for row in once]
    told += [(row, f"tags: {', '.join(row.tags)}") for row in once if row.tags]
    told += [(row, f"{row.run}: other options: {row.differs}") for row in peers if row.differs]
    told += [(row, f"{row.run}: {row.faults}") for row in peers if row.faults]
    told += [(row, f"{row.run}: {row.given}") for row in peers if row.given.rounds]
    lines = [_line(f"{row.name} {_short(row.peer)}".strip(), line) for row, line in told]
    print_lines([table(titles, rows), Text(), *lines])


def print_rounds(rounds: Sequence[Outcome]) -> None:
    """Print one line for each outcome; where an ok round has metrics, they stand in place of its reason."""
    print_lines([rounds_table(rounds)] if rounds else [Text("no rounds yet")])


def print_csv(rounds: Sequence[Outcome]) -> None:
    """Print a line of figures for each outcome: times in seconds, metrics and phases in columns of their names."""
    seconds = sorted({phase for one in rounds for phase in one.seconds})
    metrics = sorted({name for one in rounds for name in one.metrics})
    titles = ["started", "run", "round", "result", "contributors", "group", "bytes_sent", "bytes_received"]
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow([*titles, *(f"seconds_{phase}" for phase in seconds), *metrics, "reason"])
    for one in rounds:
        result = "ok" if one.ok else _result(one)
        counts = len(one.givers), len(one.group), one.bytes_sent, one.bytes_received
        took = [round(one.seconds[phase], 6) if phase in one.seconds else "" for phase in seconds]
        figures = (*took, *map(one.metrics.get, metrics))
        lines.writerow([one.started, one.run, one.round, result, *counts, *figures, escaped(one.reason)])


def rounds_table(rounds: Sequence[Outcome], one_line: bool = False) -> Table:
    """A row for each outcome; see `print_rounds`."""
    rows = []
    for one in rounds:
        took = f"{one.seconds.get('total', 0.0):.3f} s"
        told = "; ".join(filter(None, (_measured(one) or one.reason, one.waited())))
        rows.append((_when(one.started), one.run, str(one.round), _result(one), _weights(one), took, told))
    last = "metrics or why" if any(map(_measured, rounds)) else "why"
    titles = ("when", "run", "round", "result", "weights", "took", last)
    return table(titles, rows, prose=("weights", last), one_line=one_line)


def headline(status: Status, warnings: int = SHOWN_WARNINGS) -> Iterator[RenderableType]:
    """The daemon's state, and the problems for a person to solve."""
    yield _text(f"{status.name}: {status.swarm.state}", f": {status.swarm.reason}")
    for warning in status.warnings[:warnings]:
        yield _text("warning", f": {warning}")
    if len(status.warnings) > warnings:
        yield Text(f"and {len(status.warnings) - warnings} more warnings: equipoise status --all")


def overview(status: Status) -> Iterator[RenderableType]:
    """The daemon's state, its runs, and where the next round of each stands."""
    yield from headline(status)
    yield Text()
    process = f"{_short(status.peer_id)}, pid {status.pid}, up {_duration(status.uptime)}"
    connected = f"{count(len(status.swarm.connected), 'peer')}, {count(status.clients, 'script')}"
    rows = [("daemon", process), ("connected", connected)]
    if status.swarm.name:
        rows.insert(1, ("private swarm", status.swarm.name))
    given = sorted(status.swarm.bootstrap, key=lambda row: row.state == "connected")
    # The reason why one leads nowhere names its host and port.
    entries = [("joins through", row.address if row.state == "connected" else _why(row)) for row in given]
    entries += [("met before", f"{_short(row.address)}, {_why(row)}") for row in status.swarm.returning]
    rows += entries[:SHOWN_ENTRIES]
    rows.append(("reached", f"{status.swarm.reach.state}: {status.swarm.reach.reason}"))
    if not status.runs:
        rows.append(("runs", "none: a training script joins them"))
    yield _grid(rows)
    if status.runs:
        yield Text()
        titles = ("run", "state", "round", "ok", "why")
        yield table(titles, map(_run, status.runs[:SHOWN_RUNS]), prose=("why",), one_line=True)
        yield _grid([line for run in status.runs[:SHOWN_RUNS] for line in _told(run, status)])
    hidden = len(entries[SHOWN_ENTRIES:]) + len(status.runs[SHOWN_RUNS:])
    more = f"{count(hidden, 'row')} more, " if hidden else ""
    yield Text(f"{more}addresses, settings, versions: equipoise status --all", style="dim")


def _details(status: Status) -> Iterator[RenderableType]:
    swarm = status.swarm
    yield from headline(status, len(status.warnings))
    yield _line("daemon", f"{status.name}, pid {status.pid}, up {_duration(status.uptime)}")
    yield _line("peer", status.peer_id)
    yield from (_line("address", address) for address in swarm.addresses)
    yield from (_line("joins through", f"{row.address} ({_why(row)})") for row in swarm.bootstrap)
    yield from (_line("met before", f"{row.address} ({_why(row)})") for row in swarm.returning)
    yield from (_line("reached", line) for line in _reach(swarm.reach))
    yield _line("connected", f"{count(len(swarm.connected), 'peer')}, {count(status.clients, 'script')}")
    yield from (_line("direct", line) for line in _direct(swarm.direct))
    yield _line("memory", f"{status.memory / 1e6:.0f} MB")
    yield _line("holds", f"{status.tasks} tasks, {status.threads} threads, {status.files} open files")
    yield _line("kernels", f"{status.kernels.name} ({status.kernels.reason})")
    yield _line("versions", ", ".join(f"{name} {version}" for name, version in status.versions.items()))
    yield _line("log", status.log)
    yield from settings_lines(status.settings)
    for run in status.runs:
        last = "" if run.last is None else f"; last: {run.last.reason}"
        name, state, number, ok, why = _run(run)
        values = f"{run.values:,} values in {run.codec}"
        yield _line(name, f"{state}: {why}; round {number}, ok {ok}; {values}{last}")
        yield from (_line(name, line) for _, line in _told(run, status, everything=True))
    if not status.runs:
        yield _line("runs", "none: a training script joins them")


def _why(row: BootstrapStatus) -> str:
    when = "" if row.next_attempt is None else f"next attempt in {row.next_attempt:.0f} s: "
    return f"{row.state}: {when}{row.reason}"


def _reach(reach: ReachStatus) -> Iterator[str]:
    yield f"{reach.state}: {reach.reason}"
    if (relaying := reach.relaying) is not None:
        yield (
            f"relays for {count(relaying.reservations, 'peer')}, {count(relaying.circuits, 'connection')} now, "
            f"{relaying.bytes / 1e6:.1f} MB so far, at most {relaying.bandwidth / 1e6:g} MB/s; "
            f"{count(relaying.refused, 'request')} refused"
        )


def _direct(direct: DirectStatus) -> Iterator[str]:
    where = ", ".join(direct.listening) or "nowhere"
    yield f"{count(direct.channels, 'channel')} open, {direct.channel}; listens at {where}"
    if direct.refused:
        counts = ", ".join(f"{count} {why}" for why, count in sorted(direct.refused.items()))
        yield f"refused {counts}; the last: {direct.last_refusal}"


def _run(run: RunStatus) -> tuple[str, ...]:
    ok = f"{run.rounds_ok} of {run.rounds_ok + run.rounds_failed}"
    return run.name, type(run.state).__name__, str(run.round), ok, run.reason


def _told(run: RunStatus, status: Status, everything: bool = False) -> list[tuple[str, str]]:
    me, given = status.peer_id, status.given.get(run.name)
    told = [f"{topic}: {told}" for topic, told in sorted(run.told.items())]
    lines = (
        _exchanges(run.exchanges),
        _drawn(run, me, everything),
        "" if run.last is None else run.last.waited(me),
        str(given) if given and given.rounds else "",
        run.advice,
        run.transfer,
        *told,
    )
    return [(run.name, line) for line in lines if line]


def _drawn(run: RunStatus, me: str, everything: bool) -> str:
    """The peers that a federated round waits for, and those whose contributions are in."""

    def named(title: str, peers: Sequence[str]) -> str:
        shown = peers if everything else peers[:SHOWN_PEERS]
        names = ["this one" if peer == me else peer if everything else _short(peer) for peer in shown]
        more = f" and {len(peers) - len(shown)} more" if len(peers) > len(shown) else ""
        return f"{title}: {', '.join(names)}{more}" if peers else ""

    missing = [peer for peer in run.drawn if peer not in run.contributed]
    title = "drawn, not in" if run.contributed else "drawn"
    return "; ".join(filter(None, (named(title, missing), named("in", run.contributed))))


def _exchanges(told: Exchanges | None) -> str:
    if told is None:
        return ""
    counts = f"{told.ok} ok, {told.failed} failed, {told.in_doubt} in doubt"
    spread = "unknown" if told.spread is None else f"{told.spread:.2g}"
    return f"{count(told.partners, 'partner')}; exchanges: {counts}; spread {spread}"


def settings_lines(settings: Sequence[Setting]) -> Iterator[RenderableType]:
    """Each setting, its value and its origin."""
    for setting in settings:
        yield _line(setting.key, f"{_value(setting)} ({setting.origin})")


def _weights(outcome: Outcome) -> str:
    """The weights that counted; of a capped one also what was claimed."""
    weights = [outcome.contributors[peer] for peer in outcome.givers]
    if not weights:
        return ""
    if len(set(weights)) == 1 and not outcome.capped:
        return f"{weights[0]:g} each"
    if len(weights) > SHOWN_WEIGHTS:
        capped = f", {len(outcome.capped)} capped" if outcome.capped else ""
        return f"{min(weights):g} to {max(weights):g}{capped}"
    return ", ".join(map(outcome.weight, outcome.givers))


def _result(outcome: Outcome) -> str:
    if outcome.ok:
        return f"ok, {len(outcome.givers)} of {len(outcome.group)}"
    return "late" if outcome.late else "failed"


def _measured(outcome: Outcome) -> str:
    """The metrics of the training, and the scores of the state before the round."""
    before = _metrics(outcome.evaluation)
    return "; ".join(filter(None, (_metrics(outcome.metrics), f"before: {before}" if before else "")))


def _metrics(values: Mapping[str, float]) -> str:
    shown = [f"{name} {values[name]:.4g}" for name in list(values)[:SHOWN_METRICS]]
    hidden = len(values) - len(shown)
    return ", ".join([*shown, f"{hidden} more"] if hidden else shown)


def _when(started: float) -> str:
    """The local time of a moment in unix seconds; empty for 0, which outcomes of no round have."""
    if not started:
        return ""
    old = abs(time.time() - started) > TODAY_SECONDS
    return time.strftime("%Y-%m-%d %H:%M" if old else "%H:%M:%S", time.localtime(started))


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def print_lines(lines: Iterable[RenderableType], one_screen: bool = False) -> None:
    """Print lines and tables; on a terminal those of `one_screen` fit one."""
    terminal = _on_terminal()
    console = Console(width=None if terminal else WIDE, highlight=False)
    with console.capture() as captured:
        for line in lines:
            # A line of its own that is not prose is left to the terminal to wrap, so that it can be copied whole.
            console.print(line, soft_wrap=isinstance(line, Text) and line.no_wrap is True)
    printed = [line.rstrip() for line in captured.get().splitlines()]
    if terminal and one_screen and len(printed) >= console.height:
        printed[console.height - 2 :] = ["more: equipoise status --all"]
    sys.stdout.write("\n".join(printed) + "\n")


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], prose: tuple[str, ...] = (), one_line: bool = False
) -> Table:
    """A row for each of `rows`; where the terminal is too narrow, columns of `prose` wrap, or are cut to one line."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        grid.add_column(title, no_wrap=title not in prose)
    for row in rows:
        cells = zip(titles, row, strict=True)
        grid.add_row(*(_cell(text, one_line and title in prose) for title, text in cells))
    return grid


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    """Titles and texts of one line each; on a terminal a text is cut at its width."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for title, text in rows:
        table.add_row(_cell(title, False), _cell(text, True))
    return table


def _cell(text: str, one_line: bool) -> Text:
    return Text(_cleaned(text), no_wrap=one_line or None, overflow="ellipsis" if one_line else None)


def _text(title: str, rest: str) -> Text:
    return Text.assemble((escaped(title), "bold"), _cleaned(rest))


def _line(title: str, value: str) -> Text:
    """One line, as long as it may be, in which addresses and PeerIDs are whole."""
    return Text.assemble((f"{escaped(title):<15} ", "bold"), escaped(value), no_wrap=True)


def _cleaned(text: str) -> str:
    return escaped(_PEER_ID.sub(r"..\1", text))


def _short(peer: str) -> str:
    return f"..{peer[-SHOWN_CHARS:]}"


def _value(setting: Setting) -> str:
    if setting.key in RATES:
        return f"{format_size(setting.value)}/s" if setting.value else "no cap"
    value = "automatic" if setting.value is None else setting.value
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 86_400:
        return time.strftime("%H:%M:%S", time.gmtime(seconds))
    return f"{seconds / 86_400:.1f} days"
