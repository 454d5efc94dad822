"""Where a peer's connections come from, as it and as others see it, and which of a stranger's claims are tried."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

MIN_PORT = 1024
"""Routers give outgoing connections no lower one; whoever names one has somebody else's service in mind."""

MAX_INSIDE = 2
"""A member that lies has this peer send so many connections' first packets, and one more, to its neighbours."""

Place = tuple[str, int]
"""IP address and TCP port."""


@dataclass(frozen=True)
class Places:
    """Where one peer's connections come from.

    Attributes:
        outside: As public peers see them: its router's.
        inside: As its own machine and its neighbours see them.
        steady: Whether its router, as far as is known, gives every destination the same port.
    """

    outside: Place
    inside: tuple[Place, ...] = ()
    steady: bool = True


class NoPlace(Exception):
    """Nobody can be told where this peer's connections come from; the message says why."""


def judge(seen: Iterable[Place], inside: Iterable[Place]) -> Places:
    """Return this peer's places by what public peers have said.

    Of several the most must agree on the address: one that lies would have others connect to whom it likes.

    Args:
        seen: Where each of them saw a connection come from; all left from one local port.
        inside: That port's own addresses.

    Raises:
        NoPlace: They have said nothing, or do not agree.
    """
    seen = list(seen)
    # A neighbour sees what is inside, which helps nobody beyond the router.
    outside = [place for place in seen if ipaddress.ip_address(place[0]).is_global] or seen
    if not outside:
        raise NoPlace("no public peer has told where its connections come from")
    [(host, votes)] = Counter(host for host, _ in outside).most_common(1)
    if 2 * votes <= len(outside):
        told = " and ".join(sorted({host for host, _ in outside}))
        raise NoPlace(f"public peers do not agree where its connections come from: {told}")
    [(place, alike)] = Counter(place for place in outside if place[0] == host).most_common(1)
    return Places(place, tuple(dict.fromkeys(inside))[:MAX_INSIDE], steady=2 * alike > votes)


def targets(own: Places, theirs: Places) -> tuple[Place, ...]:
    """Return where the other peer may be found, the likeliest first; empty if it names nothing worth a packet.

    Behind one router (one public address), it is sought inside too. Addresses that nobody outside could have are
    tried only where this peer's own is such a one. One side's port must be known; from the other, a router that looks
    at addresses only lets a connection in whatever its port (RFC 5382, section 4.3).
    """
    found = []
    if (own.steady or theirs.steady) and _alike(own.outside, theirs.outside):
        found = [theirs.outside]
    if own.outside[0] == theirs.outside[0]:
        near = theirs.inside[:MAX_INSIDE]
        found = [place for place in near if any(_alike(one, place) for one in own.inside)] + found
    foreign = (place for place in dict.fromkeys(found) if place not in (own.outside, *own.inside))
    return tuple(place for place in foreign if place[1] >= MIN_PORT)


def obstacle(own: Places, theirs: Places) -> str:
    """Return in words what is known to stand between the two; empty if nothing is."""
    unsteady = [whose for whose, one in (("this", own), ("the other", theirs)) if not one.steady]
    if not unsteady:
        return ""
    return f"{' and '.join(unsteady)} side's router gives every destination another port"


def _alike(own: Place, theirs: Place) -> bool:
    here, there = ipaddress.ip_address(own[0]), ipaddress.ip_address(theirs[0])
    if there.is_multicast or there.is_unspecified or here.version != there.version:
        return False
    return (here.is_global, here.is_loopback) == (there.is_global, there.is_loopback)
