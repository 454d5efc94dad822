"""How many strangers may stand at the door at once, and who has to leave when one more comes. Sans IO."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Generic, TypeVar

MAX_WAITING = 64
"""Connections that have not proved who they are: each costs a descriptor, a task and some KB."""

Guest = TypeVar("Guest")


class Gate(Generic[Guest]):
    """Strangers by the address that they come from.

    When it is full, the oldest of the address that has the most goes: a flood from few addresses meets itself, and
    whoever comes from elsewhere gets in. An honest handshake takes milliseconds; the oldest is slow or idle.
    """

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._waiting: dict[Guest, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, guest: Guest, address: str) -> Guest | None:
        """Let `guest` of an IP address in; return who has to go for it, if anybody."""
        host = _household(address)
        evicted = None
        if len(self._waiting) >= self._limit:
            most = max(self._counts.values())
            evicted = next(one for one, home in self._waiting.items() if self._counts[home] == most)
            self.leave(evicted)
        self._waiting[guest] = host
        self._counts[host] += 1
        return evicted

    def leave(self, guest: Guest) -> None:
        """Forget `guest`; idempotent."""
        host = self._waiting.pop(guest, None)
        if host is not None:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]


def _household(address: str) -> str:
    """Return what one customer has of addresses: of IPv6 ones, 2**64."""
    if ":" not in address:
        return address
    bare = address.partition("%")[0]
    return str(ipaddress.ip_network((bare, 64), strict=False))
