"""Strangers that tell daemons of peers that there are not: `from e2e.strangers import main; main()`, and a way.

`name`: genuine records of made-up identities, all of which name one third party. `number`: the same, and all claim to
be in the last round that a record can name, with 1e12 samples. `forge`: records with false signatures, as fast as the
daemons take them. Arguments: the way, a home, the run, the third party's port, how many records, and the addresses of
the daemons. A stranger prints "connected", and begins with SIGUSR1.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from equipoise.averaging.manifest import MAX_ROUND
from equipoise.dht.address import parse_address
from equipoise.dht.identity import Identity
from equipoise.dht.options import SwarmOptions
from equipoise.dht.protocol import CallError
from equipoise.dht.records import TTL_SECONDS, Kept, Readiness, seal
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.dht.swarm import Swarm

AT_ONCE = 8
"""Calls to one daemon under way, of one PeerID."""
PAGE = 40
"""Records in one call."""
NAME_SECONDS = 0.1
"""Between two pages of genuine records."""


def records(run: str, port: int, count: int, home: Path, round: int, accumulated: float) -> list[Kept]:
    """Genuine records of `count` identities, which say that they listen at the third party's port."""
    made = []
    for _ in range(count):
        identity = Identity(Ed25519PrivateKey.generate(), home)
        record = Readiness(
            version=PROTOCOL_VERSION,
            peer=identity.peer,
            run=run,
            sequence=1,
            state="ready",
            round=round,
            accumulated=accumulated,
            dialable=True,
            addresses=(f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer}",),
        )
        made.append(Kept(identity.peer, seal(record, identity), TTL_SECONDS))
    return made


async def attack(way: str, home: Path, run: str, port: int, count: int, targets: list[str]) -> None:
    """Tell `targets`, until killed."""
    member = Swarm(home, SwarmOptions(listen=["/ip4/127.0.0.1/tcp/0"], join=targets))
    await member.start()
    claimed = (MAX_ROUND, 1e12) if way == "number" else (0, 0.0)
    told = records(run, port, count, home, *claimed)
    if way == "forge":
        told = [Kept(one.subkey, one.data[:-1] + bytes([one.data[-1] ^ 1]), TTL_SECONDS) for one in told]
    pages = [told[at : at + PAGE] for at in range(0, len(told), PAGE)]
    peers = [address.rpartition("/")[2] for address in targets]
    for address in targets:
        await member._protocol.dialer.connect(parse_address(address))
    yield_processor(os.getpid(), member.status().p2pd_pid)
    begun, killed = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, begun.set)
    print("connected", flush=True)
    await begun.wait()

    async def tell(peer: str, offset: int) -> None:
        for page in itertools.islice(itertools.cycle(pages), offset, None):
            try:
                await member._protocol.store(peer, page)
            except CallError:
                await asyncio.sleep(0)
            if way != "forge":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(killed.wait(), NAME_SECONDS)

    lanes = AT_ONCE if way == "forge" else 1
    await asyncio.gather(*(tell(peer, lane * 7 % len(pages)) for peer in peers for lane in range(lanes)))


def yield_processor(*processes: int | None) -> None:
    """Leave the processor to others: a real stranger computes on a machine of its own.

    Where Linux groups processes by session, the nice value counts within a session only, and the group has its own.
    """
    for process in filter(None, processes):
        psutil.Process(process).nice(19)
        group = Path(f"/proc/{process}/autogroup")
        if group.exists():
            group.write_text("19")


def main() -> None:
    """Run what the arguments say."""
    os.setsid()
    way, home, run, port, count, *targets = sys.argv[1:]
    asyncio.run(attack(way, Path(home), run, int(port), int(count), targets))
