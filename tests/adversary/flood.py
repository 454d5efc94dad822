"""`main`, with the arguments ADDRESS SWARM_KEY RATE FOLDER: 16 PeerIDs present bad tokens to one daemon until SIGTERM.

It prints `begun` once all of them have begun, and then each second how many presentations were answered so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from equipoise.dht.admission import Invitation, Link, public_half
from equipoise.dht.gate import PRESENT
from equipoise.dht.options import SwarmOptions
from equipoise.dht.swarm import Swarm
from fakes.memory import passed

ATTACKERS, NEVER = 16, 2**32 - 1
SEED, OTHER = bytes([5]) * 32, bytes([6]) * 32


class Flood:
    """Presentations of tokens of another swarm, by several PeerIDs.

    Attributes:
        answered: How many were answered.
    """

    def __init__(self, address: str, key: bytes, rate: float) -> None:
        self.answered = 0
        self._address, self._key, self._pause = address, key, ATTACKERS / rate
        self._bad = Invitation("x", public_half(OTHER), (), OTHER).invite(
            SEED, Link(bytes(32), "trainer", NEVER)
        )

    async def present(self, swarm: Swarm) -> None:
        """Present one after another for ever, at the rate of one attacker."""
        target, following = self._address.rpartition("/")[2], time.monotonic()
        token = self._bad.token(swarm.peer, 0.0).encode()
        while True:
            with contextlib.suppress(ConnectionError):
                await swarm._protocol.dialer.reach(target)
                await swarm._link._call(target, swarm.gate.scoped(PRESENT), token, 3.0)
                self.answered += 1
            following = max(following + self._pause, time.monotonic() - 1.0)
            await passed(max(0.0, following - time.monotonic()))

    async def run(self, folder: Path) -> None:
        """Start all attackers, and let them present until SIGTERM."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for number in range(ATTACKERS):
                options = SwarmOptions(listen=("/ip4/127.0.0.1/tcp/0",))
                swarm = Swarm(folder / f"attacker{number}", options)
                await swarm.start()
                stack.push_async_callback(swarm.stop)
                swarm.gate.swarm = self._key
                swarm._protocol.dialer.learn(self._address.rpartition("/")[2], [self._address])
                tasks.create_task(self.present(swarm))
            print("begun", flush=True)
            while True:
                await passed(1.0)
                print(self.answered, flush=True)


def main() -> None:
    """Flood as the command line says."""
    os.nice(19)  # What the attackers themselves compute would fall on other machines.
    address, key, rate, folder = sys.argv[1:]
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(Flood(address, bytes.fromhex(key), float(rate)).run(Path(folder)))
