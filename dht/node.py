"""This peer's node of the DHT: Kademlia look-ups by hivemind's `DHTNode` over our guarded protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from equipoise.dht.protocol import CallError, RecordProtocol
from equipoise.dht.records import Kept
from equipoise.dht.substrate import DHTID, DHTNode, PeerID

REPLICAS = 5
"""Peers that keep a record, hivemind's default: with 30 % of them gone at once, one of 400 records is lost."""
BEAM = 8
"""Peers nearest to a key that a look-up asks; some more than keep its records."""
WORKERS = 4
LOOKUP_SECONDS = 6.0
"""Two calls that time out, one after the other."""
MAX_BANS = 4096
"""Peers whose failures are remembered."""

_log = logging.getLogger(__name__)


class Node:
    """Finds the peers nearest to keys; what they keep under those keys lands in the protocol's ledger."""

    def __init__(self, protocol: RecordProtocol) -> None:
        self.protocol = protocol
        self._dht = _make_dht_node(protocol)
        self._traversals: set[asyncio.Task[dict[bytes, tuple[str, ...]]]] = set()

    async def meet(self, peer: str) -> None:
        """Ping `peer`, then look for this peer's own neighbours through it.

        Raises:
            CallError: It does not answer, or not as an equipoise daemon of this version.
        """
        await self.protocol.ping(peer)
        await self.look_up([self.protocol.node_id.to_bytes()])

    async def look_up(self, keys: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        """Fetch what is kept under `keys` (20 bytes each) into the ledger; return the nearest peers of each.

        This peer is left out. Weather is not an error: nobody found means nobody returned.
        """
        if len(self.protocol.blacklist.ban_counter) > MAX_BANS:
            self.protocol.blacklist.clear()
        # hivemind's traversal leaves tasks behind when it is cancelled: it is waited for, or left to end by itself.
        task = asyncio.create_task(self._traverse(keys))
        self._traversals.add(task)
        task.add_done_callback(self._traversals.discard)
        await asyncio.wait({task}, timeout=LOOKUP_SECONDS)
        if not task.done():
            _log.info("a look-up takes more than %.0f s", LOOKUP_SECONDS)
            return dict.fromkeys(keys, ())
        return task.result()

    async def _traverse(self, keys: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        queries = [DHTID.from_bytes(key) for key in keys]
        found = await self._dht.find_nearest_nodes(
            queries, k_nearest=REPLICAS, beam_size=BEAM, exclude_self=True
        )
        return {
            query.to_bytes(): tuple(str(peer) for peer in nearest.values())
            for query, nearest in found.items()
        }

    async def stop(self) -> None:
        """Wait for look-ups to end; to be called once calls fail at once, for the link is detached."""
        if self._traversals:
            await asyncio.wait(set(self._traversals))

    async def store(self, peer: str, records: Sequence[Kept]) -> bool:
        """Have `peer` keep `records`; False if it does not answer."""
        with contextlib.suppress(CallError):
            await self.protocol.store(peer, records)
            return True
        return False


def _make_dht_node(protocol: RecordProtocol) -> Any:
    # Not DHTNode.create: that registers hivemind's own handlers, and ends in an error without a bootstrap peer.
    node = DHTNode(_initialized_with_create=True)
    node.node_id = protocol.node_id
    node.peer_id = PeerID.from_base58(protocol.peer)
    node.protocol = protocol
    node.num_replicas, node.num_workers = REPLICAS, WORKERS
    node.blacklist = protocol.blacklist
    node.is_alive = True
    return node
