"""The times for which peers wait for each other, in a round and before it. All derive from a few, so their order holds.

ARCHITECTURE.md has a table of them.
"""

from __future__ import annotations

HEARTBEAT_SECONDS = 0.25
"""Time between two signs of life of a member."""

SILENCE_SECONDS = 8 * HEARTBEAT_SECONDS
"""Longest silence of a living member on an unknown link. Of eight daemons on two busy cores, healthy ones pause for up
to 1 s."""

MAX_SILENCE_SECONDS = 3 * SILENCE_SECONDS
"""Longest silence of a living member with any gaps and round-trip time. So no member's earlier pauses delay the notice
of its death beyond this."""

ROUND_TRIPS = 4
"""Round-trip times by which a member may be silent for longer: a channel takes that many to open, and packets on a long
link are held up for longer too."""

STALL_SECONDS = SILENCE_SECONDS
"""Longest time without progress; then a member tries a step another way. A dead member is noticed no later."""

WAITING_SECONDS = STALL_SECONDS / 2
"""Time between two `Waiting` messages of a member: two within a stall, so that one may be late."""

DIRECT_SECONDS = SILENCE_SECONDS / 2
"""Longest time that frames wait for the opening of a direct channel: so short that the member does not look dead."""

LINGER_SECONDS = 2.5 * STALL_SECONDS
"""Longest time that a member answers members without the outcome, once all living members hold the mean. It is longer
than two stalls: a member that was cut off asks after the first, and again after the second."""

KEEPALIVE = SILENCE_SECONDS / 10
"""Seconds between a coordinator's messages to parked peers, 100 bytes each. With `OVERDUE_SECONDS` it bounds the time
for which a stopped coordinator can hold them; of the two, this time is cheaper to keep small."""

PATIENT_KEEPALIVE = SILENCE_SECONDS / 2
"""Seconds between a coordinator's messages to peers that are parked for minutes, while others train: 100 bytes each. A
coordinator that is killed shows by its channel, one that is stopped by its silence."""

OVERDUE_SECONDS = SILENCE_SECONDS - KEEPALIVE
"""Longest silence of a coordinator beyond its promised message: busy cores have held up a live one for a second. When a
coordinator stops, its messages, this silence and a round fit into the 2.5 s in which a group is done without it."""

REPLY_SECONDS = SILENCE_SECONDS - KEEPALIVE / 2
"""Longest time for a coordinator's first answer: about its longest silence later."""

INVITE_SECONDS = KEEPALIVE
"""Time after which a coordinator asks missing peers whether they are there, which reveals dead peers."""

SILENT_SECONDS = SILENCE_SECONDS - 1.5 * KEEPALIVE
"""Longest time for the answer of a peer that was asked whether it is there: a live peer answers in one round trip, even
if its trainer is busy, or in a second on busy cores. With `INVITE_SECONDS` and a round it fits into the 2.5 s too."""

MISSED_SECONDS = INVITE_SECONDS / 2
"""Time before a peer asks another about a round of which it has no manifest: mostly the manifest is on its way. It is
shorter than `INVITE_SECONDS`; otherwise members that missed the manifest would form a group of their own."""

GRACE = HEARTBEAT_SECONDS
"""Seconds that a group stays open for peers close behind: after the latest join if its members are short of time, and
after a pause of the coordinator itself, so that it reads the messages that came meanwhile."""

INITIAL_WAIT = 3.0
"""Least wait of a group for late peers, before it knows a few rounds: a training script's first step (warm-up,
compilation) is most uneven."""

MIN_WAIT = 1.0
"""Least wait of a group for late peers: with less, a hiccup of busy cores costs a member its round. Only a live
peer that is late makes a group wait so long: dead peers are found out sooner."""

MAX_WAIT = 10.0
"""Longest wait of a group for late peers, and so the most that a lie about lateness can cause. A peer that
is always later than this belongs in the next round."""

HOLD_SECONDS = MAX_WAIT + REPLY_SECONDS
"""Most seconds that one coordinator may cost a search before the joiner asks others first. An honest coordinator needs
at most `MAX_WAIT` once a group is possible, and the joiner waits for one missing answer. Refusals count: no peer holds
a search by refusing and luring. A coordinator that invites the joiner later gets the time of one answer."""

REDRAWN_SECONDS = 2 * PATIENT_KEEPALIVE
"""Time for a parked observer to leave for its training, after it has been drawn in a dead peer's place. If it stays, it
declines. Its coordinator tells it within `PATIENT_KEEPALIVE`."""

SHORT_SECONDS = SILENCE_SECONDS
"""Seconds that a join may stay parked without a possible group. Then the joiner looks again: other peers may have
joined another coordinator, because views of the run differ by a look or two."""

BEHIND_SECONDS = 1.5 * SILENCE_SECONDS
"""Time for which the others are beyond the round of a contribution, by their own word, before it is late. A coordinator
that has closed the group says so in less time, or is lost and the next one asked."""

RENEW_SECONDS = 1.5 * SILENCE_SECONDS
"""Longest time between two asks of a download. Asks find new donors, and tell known donors to hold the image."""

ASKER_SECONDS = 5 * RENEW_SECONDS
"""Longest silence of a newcomer before its donor forgets it."""


def silence(rtt: float) -> float:
    """Return the longest silence of a living member with this round-trip time; both in seconds."""
    return min(SILENCE_SECONDS + ROUND_TRIPS * rtt, MAX_SILENCE_SECONDS)
