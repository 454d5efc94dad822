"""Pairs of peers with direct transports on loopback, in the test's loop, without libp2p."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from equipoise.dht.address import ListenAddress
from equipoise.dht.direct.transport import DirectOptions, DirectTransport
from equipoise.dht.identity import load_or_create

LOOPBACK = (ListenAddress("/ip4/127.0.0.1/tcp/0", "127.0.0.1", 0),)


class Peers:
    """Makes direct transports; stops them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all: list[DirectTransport] = []

    def make(self, name: str, layer="aead", listen=LOOPBACK) -> DirectTransport:
        folder = self._path / f"run-{name}"
        folder.mkdir()
        identity = load_or_create(self._path / name)
        transport = DirectTransport(identity, folder, DirectOptions(listen, layer))
        transport.serve(None)
        transport.start()
        self.all.append(transport)
        return transport

    def pair(self, layer="aead") -> tuple[DirectTransport, DirectTransport]:
        """Two that have admitted each other."""
        first, second = self.make("first", layer), self.make("second", layer)
        introduce(first, second)
        return first, second

    async def stop(self) -> None:
        for transport in self.all:
            await transport.stop()


def introduce(*transports: DirectTransport) -> None:
    """Have all admit all."""
    for one in transports:
        for other in transports:
            if one is not other:
                one.admit(other.peer, other.credential)


@pytest.fixture
async def peers(tmp_path: Path) -> AsyncIterator[Peers]:
    peers = Peers(tmp_path)
    yield peers
    await peers.stop()


Accept = Callable[[], Awaitable[object]]
