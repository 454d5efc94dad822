"""What `bench_round.py` has measured, and how it is summed up and printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from equipoise.averaging.partition import Link, balance, exchange_seconds

RIVALS = ("gloo", "hivemind")
MAX_REASONS = 6


@dataclass
class Row:
    """What has been measured of one system; times in seconds, one value a round."""

    name: str
    exchange: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    encoded: float = 0.0
    error: float = 0.0
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)


def summary(row: Row, rows: Sequence[Row], values: int, links: Sequence[Link]) -> dict[str, Any]:
    """What is printed of one system."""
    found: dict[str, Any] = {
        "system": row.name,
        "rounds": len(row.exchange),
        "failed": len(row.failures),
        "wrong": len(row.wrong),
        "error": row.error,
    }
    if row.exchange:
        for key in ("exchange", "call", "beyond"):
            times = [1e3 * value for value in getattr(row, key)]
            found |= {f"{key}_min_ms": min(times), f"{key}_median_ms": statistics.median(times)}
        found |= {"cpu_s": statistics.mean(row.cpu), "wire_mb": statistics.median(row.wire) / 1e6}
        found |= ratios(row, rows) | (shares(row, values, links) if links else {})
    if row.memory:
        found["peak_mb"] = max(one["peak"] for one in row.memory) / 1e6
        if "daemon" in row.memory[0]:
            found["daemon_beyond_tensors_mb"] = max(one["daemon"] for one in row.memory) / 1e6
        if "pss" in row.memory[0]:
            found["pss_mb"] = max(one["pss"] for one in row.memory) / 1e6
    if row.phases:
        found["phases_median_ms"] = {
            name: 1e3 * statistics.median(one.get(name, 0.0) for one in row.phases) for name in row.phases[0]
        }
    reasons = [f"failed: {one}" for one in dict.fromkeys(row.failures)] + [
        f"wrong: {one}" for one in row.wrong
    ]
    if reasons:
        found["reasons"] = reasons[:MAX_REASONS]
    return found


def ratios(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    """The median exchange and call over those of each rival, the call over that of ours in another checkout; of the
    wire's exchange of as many bytes, the share that is reached.
    """
    mine = statistics.median(row.exchange)
    others = {one.name: statistics.median(one.exchange) for one in rows if one is not row and one.exchange}
    found = {f"x_{name}": mine / other for name, other in others.items() if name.startswith(RIVALS)}
    for one in rows:
        if one is not row and one.call and (one.name.startswith(RIVALS) or "@" in one.name):
            found[f"call_x_{one.name}"] = statistics.median(row.call) / statistics.median(one.call)
    for one in rows:
        if one.name.startswith("wire") and one.name in others and one.encoded == row.encoded:
            found["of_wire"] = others[one.name] / mine
    return found


def shares(row: Row, values: int, links: Sequence[Link]) -> dict[str, Any]:
    """The best time that the links allow, in Mbit/s up and down, and how far off the median is."""
    fractions = balance(links, [True] * len(links))
    best = (
        values
        * row.encoded
        * exchange_seconds([(up * 1e6 / 8, down * 1e6 / 8) for up, down in links], fractions)
    )
    return {"best_ms": 1e3 * best, "x_best": statistics.median(row.exchange) / best}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a system, then phases and the reasons of failures."""
    names = list(
        dict.fromkeys(name for row in rows for name in row if name not in ("reasons", "phases_median_ms"))
    )
    heads = [
        name.replace("_median", "").replace("_ms", " ms").replace("_beyond_tensors", "") for name in names
    ]
    cells = [heads] + [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    for row in rows:
        if "phases_median_ms" in row:
            phases = "  ".join(f"{name} {value:.0f}" for name, value in row["phases_median_ms"].items())
            lines.append(f"{row['system']}: medians of the first peer's phases in ms: {phases}")
        lines += [f"{row['system']} {reason}" for reason in row.get("reasons", ())]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.2f}" if value < 10 else f"{value:.0f}"
