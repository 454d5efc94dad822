"""Peers with direct transports on loopback, in the test's loop, without libp2p."""

from __future__ import annotations

import asyncio
from pathlib import Path

from equipoise.dht.address import ListenAddress
from equipoise.dht.direct.transport import DirectTransport
from equipoise.dht.identity import Identity, load_or_create

LOOPBACK = (ListenAddress("/ip4/127.0.0.1/tcp/0", "127.0.0.1", 0),)


class Peers:
    """Makes direct transports; stops them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[DirectTransport] = []
        self.accepted: asyncio.Queue = asyncio.Queue()

    def identity(self, name: str) -> Identity:
        return load_or_create(self.path / name)

    def make(self, name: str, layer="aead", listen=LOOPBACK) -> DirectTransport:
        """A transport of the identity `name`."""
        transport = DirectTransport(self.identity(name), listen, layer)
        transport.serve(self._keep)
        transport.start()
        self.all.append(transport)
        return transport

    def pair(self, layer="aead") -> tuple[DirectTransport, DirectTransport]:
        """Two that have admitted each other."""
        first, second = self.make("first", layer), self.make("second", layer)
        introduce(first, second)
        return first, second

    async def connected(self, layer="aead"):
        """Both ends of a channel between two, the dialling one first."""
        first, second = self.pair(layer)
        return await first.open(second.peer), await self.accepted.get()

    async def stop(self) -> None:
        for transport in self.all:
            await transport.stop()

    async def _keep(self, channel) -> None:
        await self.accepted.put(channel)
        await asyncio.Event().wait()


def introduce(*transports: DirectTransport) -> None:
    """Have all admit all."""
    for transport in transports:
        for other in transports:
            if transport is not other:
                transport.admit(other.peer, other.credential)


def port_of(transport: DirectTransport) -> tuple[str, int]:
    host, _, port = transport.status().listening[0].rpartition(":")
    return host, int(port)


def refused(transport: DirectTransport) -> dict[str, int]:
    return transport.status().refused
