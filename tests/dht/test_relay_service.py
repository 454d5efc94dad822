"""A relay among peers that ask for too much, and for what it cannot give."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from equipoise.dht import base58
from equipoise.dht.identity import peer_of
from equipoise.dht.link import LinkError
from equipoise.dht.relay import service
from equipoise.dht.relay.messages import Kind, Message, Status, decode_hop, encode_hop
from equipoise.dht.relay.service import MAX_CIRCUITS, MAX_CIRCUITS_PER_PEER, RelayRules, RelayService
from equipoise.dht.state import RelayStatus
from equipoise.dht.streams import Stream, receive_message, send_message

PEERS = [peer_of(bytes([number]) * 32) for number in range(1, 100)]
TARGET = PEERS[0]


class Relay:
    """A relay service whose p2pd is made up; every stream is one end of a socket pair."""

    def __init__(self) -> None:
        self.service = RelayService(self, self._connected, RelayRules())  # type: ignore[arg-type]
        self.called: asyncio.Queue[Stream] = asyncio.Queue()
        self.ends: list[Stream] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.here = asyncio.Event()
        self.here.set()
        self.refusing = False

    async def _connected(self) -> frozenset[str]:
        await self.here.wait()
        return frozenset() if self.refusing else frozenset(PEERS)

    async def open_stream(self, peer: str, protocol: str, seconds: float) -> Stream:
        near, far = self._pair()
        await self.called.put(far)
        return near

    def _pair(self) -> list[Stream]:
        pair = [Stream(one, buffer_bytes=0) for one in socket.socketpair()]
        self.ends += pair
        return pair

    async def ask(self, peer: str, message: Message) -> Stream:
        """Begin a request; returns the asker's end."""
        near, far = self._pair()
        await send_message(far, encode_hop(message))
        self.tasks.append(asyncio.create_task(self.service.handle(peer, False, near)))
        return far

    @property
    def status(self) -> RelayStatus:
        status = self.service.status()
        assert status is not None
        return status

    async def connect(self, peer: str) -> Stream:
        return await self.ask(peer, Message(Kind.CONNECT, peer=base58.decode(TARGET)))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for end in self.ends:
            end.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    relay = Relay()
    await answer(await relay.ask(TARGET, Message(Kind.RESERVE)))
    yield relay
    await relay.close()


async def answer(end: Stream) -> int:
    return decode_hop(await receive_message(end)).status


async def test_who_asks_many_times_at_once_gets_no_more(relay: Relay, until) -> None:
    relay.here.clear()
    for _ in range(MAX_CIRCUITS_PER_PEER + 5):
        await relay.connect(PEERS[1])
    await until(lambda: relay.status.refused == 5)
    assert relay.status.circuits == MAX_CIRCUITS_PER_PEER


async def test_all_together_get_no_more_than_there_is(relay: Relay, until, monkeypatch) -> None:
    monkeypatch.setattr(service, "MAX_CIRCUITS_PER_PEER", 1000)
    relay.here.clear()
    for number in range(MAX_CIRCUITS + 5):
        await relay.connect(PEERS[1 + number])
    await until(lambda: relay.status.refused == 5)
    assert relay.status.circuits == MAX_CIRCUITS


async def test_several_may_ask_for_one_that_has_gone(relay: Relay) -> None:
    relay.here.clear()
    relay.refusing = True
    ends = [await relay.connect(peer) for peer in PEERS[1:4]]
    relay.here.set()
    assert [await answer(end) for end in ends] == [Status.NO_RESERVATION] * 3
    assert relay.status.reservations == 0
    await asyncio.gather(*relay.tasks)
    assert relay.status.circuits == 0


@pytest.mark.parametrize("said", [b"\x08", b"\x08\x01\x20\xc9\x01"])
async def test_one_that_answers_nonsense_or_no_is_told_of(relay: Relay, said: bytes) -> None:
    end = await relay.connect(PEERS[1])
    await send_message(await relay.called.get(), said)
    assert await answer(end) == Status.CONNECTION_FAILED


async def test_one_that_does_not_answer_is_told_of(relay: Relay, monkeypatch) -> None:
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.05)
    end = await relay.connect(PEERS[1])
    assert await answer(end) == Status.CONNECTION_FAILED


async def test_one_that_cannot_be_called_is_told_of(relay: Relay, monkeypatch) -> None:
    async def fail(peer: str, protocol: str, seconds: float) -> Stream:
        raise LinkError("p2pd is not running")

    monkeypatch.setattr(relay, "open_stream", fail)
    assert await answer(await relay.connect(PEERS[1])) == Status.CONNECTION_FAILED
