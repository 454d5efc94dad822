"""Getting into the swarm and staying in it: every `--join` address is tried, for ever, and so is who was met before.

Not being in the swarm is a state with a reason, never an error. Because addresses are tried again even by a daemon
that has peers, islands that started apart merge as soon as one address that they share comes alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from equipoise.dht.address import Address
from equipoise.dht.dialer import Dialer, Unreached
from equipoise.dht.link import LinkError
from equipoise.dht.node import Node
from equipoise.dht.protocol import CallError
from equipoise.dht.state import AddressState, BootstrapStatus

FIRST_RETRY_SECONDS = 0.3
RETRY_GROWTH = 1.5
MAX_RETRY_SECONDS = 2.0
"""A try may take 2 s more where packets vanish: within 5 s of coming alive an address is joined."""
CHECK_SECONDS = 1.0
"""How often a connected address is looked at again."""

_log = logging.getLogger(__name__)


class AddressKeeper:
    """Keeps this peer connected to one address."""

    def __init__(self, address: Address, node: Node, dialer: Dialer) -> None:
        self.address = address
        self._node = node
        self._dialer = dialer
        self._delay = FIRST_RETRY_SECONDS
        self.status = BootstrapStatus(address.text, "trying", "not tried yet", 0)

    async def run(self) -> None:
        """Connect, watch, connect again, until cancelled."""
        while True:
            delay = await self._attend()
            await asyncio.sleep(delay)

    async def _attend(self) -> float:
        known = self.address.peer in self._node.protocol.acquainted
        if self.status.state == "connected" and known and self.address.peer in self._dialer.connected:
            return CHECK_SECONDS
        try:
            if self.address.peer not in self._dialer.connected:
                await self._dialer.connect(self.address)
            await self._node.meet(self.address.peer)
        except (Unreached, LinkError) as error:
            return self._failed(error.state if isinstance(error, Unreached) else "failed", str(error))
        except CallError as error:
            return self._failed("other version", f"connected, but {error}")
        self._delay = FIRST_RETRY_SECONDS
        self._set("connected", "connected", 0)
        return CHECK_SECONDS

    def _failed(self, state: AddressState, reason: str) -> float:
        delay, self._delay = self._delay, min(self._delay * RETRY_GROWTH, MAX_RETRY_SECONDS)
        self._set(state, reason, self.status.attempts + 1)
        return delay

    def _set(self, state: AddressState, reason: str, attempts: int) -> None:
        before, self.status = self.status, BootstrapStatus(self.address.text, state, reason, attempts)
        if (before.state, before.reason) != (state, reason):
            _log.info("bootstrap address %s: %s", self.address.text, reason)


async def rejoin(node: Node, dialer: Dialer, remembered: Sequence[str]) -> int:
    """Try to meet peers known from before, all at once; return how many answered."""

    async def one(peer: str) -> bool:
        try:
            if dialer.addresses_of(peer):
                await node.meet(peer)
                return True
        except CallError as error:
            _log.debug("%s", error)
        return False

    return sum(await asyncio.gather(*(one(peer) for peer in remembered)))
