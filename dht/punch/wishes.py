"""Whom this peer would have a hole to, when it is tried, and what has come of it. Pure: `now` is an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

WANTED_SECONDS = 600.0
"""After it was last met in a round a peer is still worth a hole for so long: some rounds are minutes apart."""
FIRST_RETRY_SECONDS = 15.0
MAX_RETRY_SECONDS = 600.0
"""A punch that failed is tried again after so long, each time twice as long: the other side may not have been in the
round yet, or busy; but what a NAT does not allow it seldom learns, and each attempt costs a relay a few messages. After
one that went well it is the former: routers there may be that let connections begin and not last."""
PATIENCE_SECONDS = 2.0
"""From first meeting a peer to punching: one may dial the other, which is simpler, and the other side learns a moment
later that both are in one round."""
MAX_WANTED = 256
"""The least recently met is forgotten; a group has at most 64 members."""
MAX_AT_ONCE = 4
"""Punches under way that began here: each holds a stream and a few sockets."""


@dataclass
class Wish:
    """One peer.

    Attributes:
        since: When it was last met.
        retry: When a punch may begin.
        under_way: Whether one is.
        failure: Why the last one failed; empty if it did not.
        delay: How long that was from the last failure; 0 after none.
    """

    since: float
    retry: float
    under_way: bool = False
    failure: str = ""
    delay: float = 0.0


class Wishes:
    """The peers met in rounds that cannot be dialled."""

    def __init__(self) -> None:
        self._wishes: OrderedDict[str, Wish] = OrderedDict()

    def want(self, peer: str, now: float) -> None:
        """`peer` was met in a round."""
        self._wishes.setdefault(peer, Wish(now, retry=now + PATIENCE_SECONDS)).since = now
        self._wishes.move_to_end(peer)
        if len(self._wishes) > MAX_WANTED:
            self._wishes.popitem(last=False)

    def due(self, now: float, lacking: Callable[[str], bool]) -> list[str]:
        """Return the peers to begin with now, those met last first; of those for which `lacking` holds."""
        room = MAX_AT_ONCE - sum(wish.under_way for wish in self._wishes.values())
        found = [
            peer
            for peer, wish in reversed(self._wishes.items())
            if not wish.under_way and wish.retry <= now < wish.since + WANTED_SECONDS and lacking(peer)
        ]
        return found[: max(0, room)]

    def began(self, peer: str) -> None:
        """A punch with a wanted peer is under way."""
        self._wishes[peer].under_way = True

    def ended(self, peer: str, failure: str, now: float) -> None:
        """It is over; `failure` says why there is no channel, if there is none."""
        wish = self._wishes.get(peer)
        if wish is not None:
            wish.under_way, wish.failure = False, failure
            wish.delay = min(2 * wish.delay or FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS) if failure else 0.0
            wish.retry = now + (wish.delay or FIRST_RETRY_SECONDS)

    def refusal(self, peer: str, now: float) -> str:
        """Return why this peer takes no part in a punch that `peer` begins; empty if it does."""
        wish = self._wishes.get(peer)
        if wish is None or now >= wish.since + WANTED_SECONDS:
            return "it has met this peer in no round of late"
        return "a punch between the two is under way" if wish.under_way else ""

    def failure(self, peer: str) -> str:
        """Return why the last punch with `peer` failed; empty if it did not, or none has ended."""
        wish = self._wishes.get(peer)
        return wish.failure if wish is not None else ""
