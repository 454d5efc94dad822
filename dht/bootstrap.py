"""Getting into the swarm and staying in it: the driver of `joining`, which decides when which way is tried."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from equipoise.dht.address import Address
from equipoise.dht.dialer import Dialer, Unreached
from equipoise.dht.joining import Attempted, Joining, Looked, NetworkChanged, Try, Way
from equipoise.dht.link import LinkError
from equipoise.dht.node import Node
from equipoise.dht.protocol import CallError, OtherVersion
from equipoise.dht.state import AddressState, BootstrapStatus

LOOK_SECONDS = 1.0
"""The longest time until a lost way into the swarm is noticed."""

_log = logging.getLogger(__name__)


class Bootstrap:
    """Tries every address to join through, for ever, and the peers met before while no peer is there.

    Attributes:
        alive: Tells the PeerIDs in contact with this peer now; None while p2pd does not run.
        remembered: Tells the PeerIDs met before, the latest first.
    """

    def __init__(self, given: Sequence[Address], node: Node, dialer: Dialer) -> None:
        self.alive: Callable[[], frozenset[str] | None] = lambda: None
        self.remembered: Callable[[], Sequence[str]] = tuple
        self._node = node
        self._dialer = dialer
        self._addresses = {Way(address.peer, address.text): address for address in given}
        self._machine = Joining(list(self._addresses), random.Random(), 0.0)
        self._changed = asyncio.Event()
        self._attempts: set[asyncio.Task[None]] = set()

    def status(self) -> tuple[BootstrapStatus, ...]:
        """Return how each address to join through fares."""
        return self._machine.status(asyncio.get_running_loop().time())

    def why_alone(self) -> tuple[bool, str]:
        """Return whether there is no network, and why this peer has met nobody."""
        return self._machine.why_alone()

    def network_changed(self) -> None:
        """Try every way again now: this machine's network, or its p2pd, is another one."""
        self._machine.handle(NetworkChanged(), asyncio.get_running_loop().time())
        self._changed.set()

    async def run(self) -> None:
        """Try and look, until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                alive = self.alive()
                if alive is not None:
                    for action in self._machine.handle(Looked(alive, self.remembered()), loop.time()):
                        self._spawn(action)
                pause = min(LOOK_SECONDS, max(0.0, self._machine.deadline - loop.time()))
                try:
                    async with asyncio.timeout(pause if alive is not None else LOOK_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            for task in self._attempts:
                task.cancel()
            if self._attempts:
                await asyncio.wait(self._attempts)

    def _spawn(self, action: Try) -> None:
        task = asyncio.create_task(self._attempt(action.way))
        self._attempts.add(task)
        task.add_done_callback(self._attempts.discard)

    async def _attempt(self, way: Way) -> None:
        state: AddressState
        try:
            state, reason = await self._outcome(way)
        except Exception as error:
            # A bug of ours, which must not be why this way is never tried again.
            _log.exception("an attempt at %s failed", way.address or way.peer)
            state, reason = "failed", f"internal error: {error!r}"
        before = self._machine.why_alone()
        self._machine.handle(Attempted(way, state, reason), asyncio.get_running_loop().time())
        self._changed.set()
        if self._machine.why_alone() != before:
            _log.info("way into the swarm %s: %s", way.address or way.peer, reason)

    async def _outcome(self, way: Way) -> tuple[AddressState, str]:
        try:
            if way.address and way.peer not in self._dialer.connected:
                await self._dialer.connect(self._addresses[way])
            await self._node.meet(way.peer)
        except Unreached as error:
            return error.state, str(error)
        except OtherVersion as error:
            return "other version", str(error)
        except (LinkError, CallError) as error:
            cause = error.__cause__
            return (cause.state, str(cause)) if isinstance(cause, Unreached) else ("failed", str(error))
        return "connected", "connected"
