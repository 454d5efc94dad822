"""The order of the spans, and the table of them that people read."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

from equipoise.averaging import timing

ARCHITECTURE = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"


def budget() -> str:
    """The module's spans as the table of ARCHITECTURE.md: name, value, derivation, bounded time."""
    rows = ["| name | value | follows from | bounds |", "|---|---|---|---|"]
    statements = ast.parse(Path(timing.__file__).read_text()).body
    for span, text in pairwise(statements):
        if (
            isinstance(span, ast.Assign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            name = ast.unparse(span.targets[0])
            given = isinstance(span.value, ast.Constant)
            bounds = " ".join(str(text.value.value).split()).split(". ")[0].split(": ")[0].rstrip(".")
            derived = "" if given else f"`{ast.unparse(span.value)}`"
            rows.append(f"| `{name}` | {getattr(timing, name):g} | {derived} | {bounds} |")
    return "\n".join(rows)


def test_the_budget_in_the_architecture_is_what_the_module_says() -> None:
    assert budget() in ARCHITECTURE.read_text(), f"put this table there:\n{budget()}"


def test_a_longer_link_has_longer_spans_within_bounds() -> None:
    assert timing.silence(0.0) == timing.SILENCE_SECONDS
    assert timing.SILENCE_SECONDS < timing.silence(0.1) < timing.silence(0.5) < timing.MAX_SILENCE_SECONDS
    assert timing.silence(60.0) == timing.MAX_SILENCE_SECONDS


def test_a_waiting_member_is_told_before_it_gives_up() -> None:
    assert timing.WAITING_SECONDS < timing.STALL_SECONDS <= timing.SILENCE_SECONDS
    assert timing.HEARTBEAT_SECONDS < timing.DIRECT_SECONDS < timing.SILENCE_SECONDS
    assert timing.LINGER_SECONDS > 2 * timing.STALL_SECONDS


def test_a_stopped_peer_is_found_out_while_its_group_gathers() -> None:
    assert timing.MISSED_SECONDS < timing.INVITE_SECONDS <= timing.KEEPALIVE < timing.GRACE
    assert timing.KEEPALIVE + timing.OVERDUE_SECONDS < 2.5
    assert timing.INVITE_SECONDS + timing.SILENT_SECONDS < timing.REPLY_SECONDS + timing.KEEPALIVE < 2.5
