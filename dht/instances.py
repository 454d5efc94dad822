"""One identity on two machines, as by a copied home: noticed by a third peer, which hears both and tells them.

libp2p does not connect a peer with itself, so the two never meet. Every start of a daemon draws an instance, which
goes with each message. A restart replaces the instance for good; one that comes back after another means that both run.
"""

from __future__ import annotations

from collections import OrderedDict, deque

MAX_PEERS = 1024
"""Peers whose instances are remembered, the latest heard."""
MAX_FORMER = 4
"""Former instances that are remembered of a peer."""
DOUBLED_SECONDS = 30.0
"""How long a peer counts as doubled after both were heard; they speak every few seconds."""


class Instances:
    """Which instances of each peer were heard."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, deque[bytes]] = OrderedDict()
        self._doubled: OrderedDict[str, float] = OrderedDict()

    def hear(self, peer: str, instance: bytes, now: float) -> None:
        """`peer` has spoken; an empty instance says nothing."""
        if not instance:
            return
        heard = self._heard.setdefault(peer, deque(maxlen=1 + MAX_FORMER))
        self._heard.move_to_end(peer)
        if heard and heard[-1] != instance and instance in heard:
            self._doubled[peer] = now
            self._doubled.move_to_end(peer)
        if instance in heard:
            heard.remove(instance)
        heard.append(instance)
        for full in (self._heard, self._doubled):
            while len(full) > MAX_PEERS:
                full.popitem(last=False)

    def doubled(self, peer: str, now: float) -> bool:
        """Whether two daemons spoke as `peer` of late."""
        return self._doubled.get(peer, float("-inf")) + DOUBLED_SECONDS > now
