"""Finding and keeping relays while p2pd comes and goes."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from equipoise.dht.autonat import Reach
from equipoise.dht.identity import peer_of
from equipoise.dht.relay import client
from equipoise.dht.relay.client import MAX_CANDIDATES, RelayClient
from equipoise.dht.relay.service import Hop, Kind, Status, send
from equipoise.dht.streams import Stream

RELAY, OWN, OTHER = (peer_of(bytes([number]) * 32) for number in (1, 2, 3))


class World:
    """A relay client whose p2pd, and connections are made up."""

    def __init__(self) -> None:
        self.answer = Hop(kind=Kind.STATUS, status=Status.OK)
        self.ends: list[Stream] = []
        self.relays = RelayClient(self, self, OWN)  # type: ignore[arg-type]
        self.relays.offers[RELAY] = None
        self.attached = True
        self.paths: dict[str, tuple[str, ...]] = {}

    async def reach(self, peer: str) -> None:
        self.paths.setdefault(peer, ("/ip4/44.0.0.1/tcp/4001",))

    async def disconnect(self, peer: str) -> None:
        del self.paths[peer]

    async def refresh(self) -> None:
        return None

    def addresses_of(self, peer: str) -> tuple[str, ...]:
        return (f"/ip4/44.0.0.1/tcp/4001/p2p/{peer}",)

    async def open_stream(self, peer: str, protocol: str, seconds: float) -> Stream:
        if all("p2p-circuit" in path for path in self.paths[peer]):
            self.answer = Hop(kind=Kind.STATUS, status=Status.PERMISSION_DENIED)
        near, far = (Stream(one, buffer_bytes=0) for one in socket.socketpair())
        await send(far, self.answer)
        self.ends.append(far)
        return near


async def hold(world: World) -> None:
    """Take a place at the relay."""
    await world.relays._tend()
    assert list(world.relays.held) == [RELAY]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    for end in world.ends:
        end.close()


async def test_a_relay_that_came_through_another_relay_is_dialled(world: World) -> None:
    world.paths[RELAY] = (f"/ip4/44.0.0.2/tcp/4001/p2p/{OTHER}/p2p-circuit",)
    await hold(world)


async def test_a_place_is_given_up_when_only_a_circuit_to_the_relay_is_left(world: World) -> None:
    await hold(world)
    world.paths[RELAY] = (f"/ip4/44.0.0.2/tcp/4001/p2p/{OTHER}/p2p-circuit",)
    await world.relays._tend()
    assert not world.relays.held
    assert "not connected" in world.relays.reason


async def test_a_place_that_is_not_renewed_is_given_up(world: World, monkeypatch) -> None:
    await hold(world)
    monkeypatch.setattr(client, "RENEW_SECONDS", -1.0)
    world.answer = Hop(kind=Kind.STATUS, status=Status.RESERVATION_REFUSED)
    await world.relays._tend()
    assert not world.relays.held
    assert "reservation refused" in world.relays.reason


async def test_relays_that_are_gone_make_room_for_others() -> None:
    link = SimpleNamespace(attached=False, answer=Mock(), accept=Mock())
    protocol, direct = SimpleNamespace(dialer=None, peer=OWN), SimpleNamespace(port=0)
    reach = Reach(link, protocol, direct)  # type: ignore[arg-type]
    for number in range(MAX_CANDIDATES + 1):
        reach.meet(f"relay {number}", True)
        reach.meet("relay 0", True)
    assert len(reach.relays.offers) == MAX_CANDIDATES
    assert "relay 0" in reach.relays.offers
    assert "relay 1" not in reach.relays.offers
    assert f"relay {MAX_CANDIDATES}" in reach.relays.offers
    reach.meet("relay 0", False)
    assert "relay 0" not in reach.relays.offers
