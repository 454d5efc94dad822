"""The order of the spans, and the table of them that people read."""

from __future__ import annotations

from pathlib import Path

from equipoise.averaging import timing

ARCHITECTURE = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"

BUDGET = [
    ("between two words of a coordinator to a parked peer", timing.KEEPALIVE, "a tenth of a silence"),
    (
        "an overdue word of a coordinator, else it has stopped",
        timing.OVERDUE_SECONDS,
        "a silence less a word's time",
    ),
    ("a coordinator's first answer", timing.REPLY_SECONDS, "a silence less half a word's time"),
    ("a missing peer is asked whether it is there", timing.INVITE_SECONDS, "a word's time"),
    (
        "such a peer answers, or is taken for dead",
        timing.SILENT_SECONDS,
        "a silence less one and a half words' time",
    ),
    ("a manifest that others speak of is asked for", timing.MISSED_SECONDS, "half the time of an invitation"),
    ("between two signs of life", timing.HEARTBEAT_SECONDS, "given"),
    ("a direct channel opens, else libp2p carries the frames", timing.DIRECT_SECONDS, "half a silence"),
    (
        "between two words that a member waits for another that delivers",
        timing.WAITING_SECONDS,
        "half a stall",
    ),
    ("a silent member is taken for dead", timing.SILENCE_SECONDS, "eight heartbeats"),
    ("the same at a round-trip time of 0.3 s", timing.silence(0.3), "four round trips more"),
    ("the same, whatever the link", timing.MAX_SILENCE_SECONDS, "three silences"),
    ("a step without progress is tried another way", timing.STALL_SECONDS, "a silence"),
    ("a finished member answers others", timing.LINGER_SECONDS, "two and a half stalls"),
]
"""The steps of matchmaking and of a round, each with its most seconds and their derivation."""


def test_the_budget_in_the_architecture_is_what_the_module_says() -> None:
    rows = [f"| {what} | {seconds:g} s | {why} |" for what, seconds, why in BUDGET]
    assert (
        "\n".join(["| what | takes at most | follows from |", "|---|---|---|", *rows])
        in ARCHITECTURE.read_text()
    )


def test_a_longer_link_has_longer_spans_within_bounds() -> None:
    assert timing.silence(0.0) == timing.SILENCE_SECONDS
    assert timing.SILENCE_SECONDS < timing.silence(0.1) < timing.silence(0.5) < timing.MAX_SILENCE_SECONDS
    assert timing.silence(60.0) == timing.MAX_SILENCE_SECONDS


def test_whoever_waits_is_told_before_it_gives_up() -> None:
    assert timing.WAITING_SECONDS < timing.STALL_SECONDS <= timing.SILENCE_SECONDS
    assert timing.HEARTBEAT_SECONDS < timing.DIRECT_SECONDS < timing.SILENCE_SECONDS
    assert timing.LINGER_SECONDS > 2 * timing.STALL_SECONDS


def test_a_stopped_peer_is_found_out_while_its_group_gathers() -> None:
    assert timing.MISSED_SECONDS < timing.INVITE_SECONDS <= timing.KEEPALIVE < timing.GRACE
    assert timing.KEEPALIVE + timing.OVERDUE_SECONDS < 2.5
    assert timing.INVITE_SECONDS + timing.SILENT_SECONDS < timing.REPLY_SECONDS + timing.KEEPALIVE < 2.5
