"""Hosts that are far from each other: every packet takes its time, and now and then a host's packets stand still.

    with FarNetwork(4, delay=0.15, stall=1.0) as network:
        command = network.hosts[0].command(["python", ...])     # runs it on that host

Each host is a network namespace with a TUN device. A process of ours reads the packets of all of them, keeps each for
`delay` seconds, and hands it to the host that it is addressed to; nothing is lost or reordered. Every few seconds the
packets to and from one host stand still for `stall` seconds. (The kernels that tests run on have no `netem`.)
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

SUBNET = "44.128.1"
"""A public network, as in `e2e.netns`: libp2p announces no private address."""

STALL_EVERY_SECONDS = (2.0, 6.0)
"""Least and most time between two stalls."""

PACKET_BYTES = 2048
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000

_serials = itertools.count()


@dataclass(frozen=True)
class FarHost:
    """One host: its namespace and its address."""

    namespace: str
    address: str

    def command(self, arguments: list[str]) -> list[str]:
        """Return the command line that runs `arguments` on this host, as the very process that is started."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


class FarNetwork:
    """Hosts and what lies between them, from `__enter__` to `__exit__`.

    Args:
        hosts: How many.
        delay: Seconds that a packet takes; half of a round trip.
        stall: Seconds that one host's packets stand still every few seconds.
    """

    def __init__(self, hosts: int, delay: float, stall: float = 0.0) -> None:
        prefix = f"eq{os.getpid()}-far{next(_serials)}"
        self.hosts = tuple(FarHost(f"{prefix}-{at}", f"{SUBNET}.{at + 1}") for at in range(hosts))
        self._options = ["--delay", str(delay), "--stall", str(stall)]
        self._made: list[str] = []
        self._router: subprocess.Popen[str] | None = None

    def __enter__(self) -> FarNetwork:
        try:
            for host in self.hosts:
                _ip("netns", "add", host.namespace)
                self._made.append(host.namespace)
                _ip("-n", host.namespace, "link", "set", "lo", "up")
            command = [sys.executable, __file__, *self._options, *(host.namespace for host in self.hosts)]
            self._router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._router.stdout is not None
            assert self._router.stdout.readline() == "ready\n", "the router did not start"
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._router is not None:
            self._router.kill()
            self._router.wait()
        for namespace in self._made:
            _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


def _tun(namespace: str, address: str) -> int:
    """Make a TUN device in a namespace, which this process enters."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"far0", IFF_TUN | IFF_NO_PI))
    _ip("addr", "add", f"{address}/24", "dev", "far0")
    _ip("link", "set", "far0", "up", "mtu", "1500", "txqueuelen", "10000")
    return device


def _route(devices: list[int], delay: float, stall: float) -> None:
    """Carry packets until this process is killed."""
    host_of = {device: at for at, device in enumerate(devices)}
    chance = random.Random(7)
    under_way: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    next_stall = time.monotonic() + STALL_EVERY_SECONDS[1]
    stalled, until = -1, 0.0
    while True:
        now = time.monotonic()
        if stall and now >= next_stall:
            stalled, until = chance.randrange(len(devices)), now + stall
            next_stall = until + chance.uniform(*STALL_EVERY_SECONDS)
        while under_way and under_way[0][0] <= now:
            _, _, to, packet = heapq.heappop(under_way)
            os.write(devices[to], packet)
        wait = max(under_way[0][0] - now, 0.0) if under_way else 0.05
        for device in select.select(devices, [], [], min(wait, 0.05))[0]:
            packet = os.read(device, PACKET_BYTES)
            to = packet[19] - 1  # The last byte of an IPv4 packet's destination.
            if (
                packet[0] >> 4 != 4
                or packet[16:19] != bytes(map(int, SUBNET.split(".")))
                or to >= len(devices)
            ):
                continue
            at = time.monotonic()
            held = until if stalled in (host_of[device], to) and at < until else at
            heapq.heappush(under_way, (held + delay, next(order), to, packet))


def main() -> None:
    """Be the router between the hosts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, required=True)
    parser.add_argument("--stall", type=float, required=True)
    parser.add_argument("namespaces", nargs="+")
    options = parser.parse_args()
    devices = [_tun(name, f"{SUBNET}.{at + 1}") for at, name in enumerate(options.namespaces)]
    print("ready", flush=True)
    _route(devices, options.delay, options.stall)


if __name__ == "__main__":
    main()
