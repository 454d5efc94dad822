"""The spans for which members of a round wait for each other. All follow from a few, so that their order holds.

The table in ARCHITECTURE.md is what `budget` returns.
"""

from __future__ import annotations

HEARTBEAT_SECONDS = 0.25
"""Time between two signs of life of a member."""

SILENCE_SECONDS = 8 * HEARTBEAT_SECONDS
"""Longest silence of a living member, if nothing is known of its link. With eight daemons on two busy cores, healthy
ones pause for up to 1 s."""

MAX_SILENCE_SECONDS = 3 * SILENCE_SECONDS
"""Longest silence of a living member, whatever its gaps and its round-trip time: no member stretches by pauses of its
own how long its death goes unnoticed."""

ROUND_TRIPS = 4
"""Round-trip times by which a member may be silent for longer: what opens a channel takes that many, and where one is
long, packets are held up for longer too."""

STALL_SECONDS = SILENCE_SECONDS
"""Longest time without progress: then a step is tried another way. A dead member is noticed no later."""

WAITING_SECONDS = STALL_SECONDS / 2
"""Time between two `Waiting`s of a member: two within a stall, so that one may be late."""

DIRECT_SECONDS = SILENCE_SECONDS / 2
"""Longest time that frames wait for a direct channel that is being opened: no member looks dead for it."""

LINGER_SECONDS = 2.5 * STALL_SECONDS
"""Longest time that a member answers those who have not learnt the outcome, once all that live hold the mean. It is
longer than two stalls: one that was cut off asks after the first, and again after the second."""


def silence(rtt: float) -> float:
    """Return the longest silence of a living member with a round-trip time; both in seconds."""
    return min(SILENCE_SECONDS + ROUND_TRIPS * rtt, MAX_SILENCE_SECONDS)


def budget() -> list[tuple[str, float, str]]:
    """Return what may take how many seconds in a round, and what that follows from."""
    return [
        ("between two signs of life", HEARTBEAT_SECONDS, "given"),
        ("a direct channel opens, else libp2p carries the frames", DIRECT_SECONDS, "half a silence"),
        ("between two words that a member waits for another that delivers", WAITING_SECONDS, "half a stall"),
        ("a silent member is taken for dead", SILENCE_SECONDS, "eight heartbeats"),
        ("the same at a round-trip time of 0.3 s", silence(0.3), "four round trips more"),
        ("the same, whatever the link", MAX_SILENCE_SECONDS, "three silences"),
        ("a step without progress is tried another way", STALL_SECONDS, "a silence"),
        ("a finished member answers others", LINGER_SECONDS, "two and a half stalls"),
    ]
