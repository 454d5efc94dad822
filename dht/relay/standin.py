"""When a peer that is only reached through relays should stand in for one that can be dialled."""

from __future__ import annotations

from collections.abc import Iterable

from equipoise.dht.records import Readiness


def stands_in(mates: Iterable[Readiness]) -> bool:
    """Whether a relayed peer should say that it can be dialled, given the records of all others in its runs.

    A group needs a member that the others can open channels to: it owns shares. A relayed peer can, slowly and at a
    third party's expense, so it offers itself only where it knows others and none of them can be dialled. Nothing
    depends on all members seeing that alike: each signs what it says of itself, and whoever cannot be reached after
    all is lost to its round like any other.
    """
    mates = list(mates)
    return bool(mates) and not any(mate.dialable and mate.reach != "relayed" for mate in mates)
