"""One identity on two machines, which a third peer notices."""

from __future__ import annotations

import secrets
from collections import deque

from equipoise.dht.messages import MAX_INSTANCE_BYTES
from equipoise.limits import LruDict

MAX_PEERS = 1024
"""Most peers whose instances are remembered: the peers heard last."""
MAX_FORMER = 4
"""Most former instances remembered of one peer."""
DOUBLED_SECONDS = 30.0
"""Time for which a peer counts as doubled after both its daemons were heard; daemons speak every few seconds."""


class Instances:
    """Notices one identity on two machines, such as after a copied home: a third peer hears both, and tells them.

    libp2p does not connect a peer with itself, so the two daemons never meet. Every start of a daemon draws a random
    instance, which each message carries. A restart replaces the instance for good. So an instance that comes back after
    another one means that two daemons run.
    """

    def __init__(self) -> None:
        self.own = secrets.token_bytes(MAX_INSTANCE_BYTES)
        self._heard: LruDict[str, deque[bytes]] = LruDict(MAX_PEERS)
        self._doubled: LruDict[str, float] = LruDict(MAX_PEERS)

    def hear(self, peer: str, instance: bytes, now: float) -> None:
        """Note the instance of a message of `peer`; an empty instance is ignored."""
        if not instance:
            return
        heard = self._heard[peer] = self._heard.get(peer) or deque(maxlen=1 + MAX_FORMER)
        if instance in heard:
            if heard[-1] != instance:
                self._doubled[peer] = now
            heard.remove(instance)
        heard.append(instance)

    def doubled(self, peer: str, now: float) -> bool:
        """Tell whether two daemons spoke as `peer` within the last `DOUBLED_SECONDS`."""
        return self._doubled.get(peer, float("-inf")) + DOUBLED_SECONDS > now
