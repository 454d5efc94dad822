"""What serving newcomers costs a donor, and whom to: no single one may use up what all of them are given."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection

MAX_SNAPSHOTS, SNAPSHOTS_SECONDS = 8, 60.0
"""How many snapshots newcomers may ask a trainer for in how long: each costs it a copy of its memory."""

MAX_SNAPSHOTS_EACH = 3
"""Of those, for one newcomer: it needs one, and others where it comes too late for that or a donor fails."""

MAX_SERVINGS = 4
"""How many times one newcomer may download the chunks of one image: faults explain two, malice any number."""

DOWNLOAD_SECONDS = 600.0
"""So long after the last body a download is forgotten: who comes back then has been restarted."""

MAX_DOWNLOADS = 1024
"""Downloads that are remembered, whatever ticket they go by: some for each of a group, of each image that is held."""


class Quota:
    """Counts snapshots and bodies by newcomer. Times are the seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, frozenset[str]]] = deque(maxlen=MAX_SNAPSHOTS)
        self._served: OrderedDict[tuple[str, bytes], tuple[int, float]] = OrderedDict()

    def took(self, peers: Collection[str], now: float) -> None:
        """The trainer has taken a snapshot, which these newcomers wished for."""
        self._taken.append((now, frozenset(peers)))

    def worn(self, now: float) -> bool:
        """Whether the trainer has taken snapshots enough for now."""
        return len(self._taken) == MAX_SNAPSHOTS and now < self._taken[0][0] + SNAPSHOTS_SECONDS

    def may_wish(self, peer: str, now: float) -> bool:
        """Whether the trainer is asked for what this newcomer wishes."""
        recent = Counter(one for at, peers in self._taken if now < at + SNAPSHOTS_SECONDS for one in peers)
        return recent[peer] < MAX_SNAPSHOTS_EACH

    def room(self, peer: str, digest: bytes, chunks: int, now: float) -> int:
        """How many bodies more of an image of so many chunks this newcomer may be sent."""
        count, last = self._served.get((peer, digest), (0, now))
        return MAX_SERVINGS * (chunks + 1) - (count if now < last + DOWNLOAD_SECONDS else 0)

    def served(self, peer: str, digest: bytes, bodies: int, now: float) -> None:
        """So many bodies of an image are sent to this newcomer."""
        if not bodies:
            return
        count, last = self._served.get((peer, digest), (0, now))
        self._served[peer, digest] = (count if now < last + DOWNLOAD_SECONDS else 0) + bodies, now
        self._served.move_to_end((peer, digest))
        if len(self._served) > MAX_DOWNLOADS:
            self._served.popitem(last=False)
