"""A relay among peers that ask for too much, and for what it cannot give."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace

import base58
import pytest

from equipoise.dht import limits
from equipoise.dht.gate import Gate
from equipoise.dht.identity import peer_of
from equipoise.dht.limits import BURST_SECONDS
from equipoise.dht.p2pd_client import P2pdClientError
from equipoise.dht.relay import service
from equipoise.dht.relay.service import (
    CHUNK_BYTES,
    MAX_CIRCUITS,
    MAX_CIRCUITS_PER_PEER,
    Hop,
    Kind,
    RelayService,
    Status,
    Stop,
    receive,
    send,
)
from equipoise.dht.state import RelayStatus
from equipoise.dht.streams import Stream, receive_message, send_message

PEERS = [peer_of(bytes([number]) * 32) for number in range(1, 100)]
TARGET = PEERS[0]
RATE = 16.0 * CHUNK_BYTES
MUCH = 64 * CHUNK_BYTES
"""More than may pass in the three seconds of a test's clock."""


class Relay:
    """A relay service whose p2pd is made up; every stream is one end of a socket pair."""

    def __init__(self, bandwidth: float) -> None:
        self.gate = Gate()
        self.service = RelayService(self, self, bandwidth)  # type: ignore[arg-type]
        self.called: asyncio.Queue[Stream] = asyncio.Queue()
        self.ends: list[Stream] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.here = asyncio.Event()
        self.here.set()
        self.refusing = False

    def accept(self, protocol: str, most: int, handler: object) -> None:
        """Streams come by `ask`."""

    async def refresh(self) -> frozenset[str]:
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

    async def ask(self, peer: str, message: Hop) -> Stream:
        """Begin a request; returns the asker's end."""
        near, far = self._pair()
        await send(far, message)
        self.tasks.append(asyncio.create_task(self.service.handle(peer, False, near)))
        return far

    @property
    def status(self) -> RelayStatus:
        return self.service.status()

    async def connect(self, peer: str) -> Stream:
        return await self.ask(peer, Hop(kind=Kind.CONNECT, peer={"id": base58.b58decode(TARGET)}))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for end in self.ends:
            end.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Clock:
    """An allowance's clock, which the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: dict[asyncio.Future[None], float] = {}

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting[waiter] = self.now + seconds
        await waiter

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for waiter in [waiter for waiter, until in self.waiting.items() if until <= self.now]:
            del self.waiting[waiter]
            waiter.set_result(None)


@pytest.fixture
async def relay(request: pytest.FixtureRequest) -> AsyncIterator[Relay]:
    relay = Relay(getattr(request, "param", 12.5e6))
    await answer(await relay.ask(TARGET, Hop(kind=Kind.RESERVE)))
    yield relay
    await relay.close()


@pytest.mark.parametrize("relay", [RATE], indirect=True)
async def test_both_directions_together_are_carried_as_fast_as_allowed_and_no_faster(
    relay: Relay, until, monkeypatch
) -> None:
    clock = Clock()
    ours = SimpleNamespace(get_running_loop=lambda: clock, sleep=clock.sleep)
    monkeypatch.setattr(limits, "asyncio", ours)
    near = await relay.connect(PEERS[1])
    far = await relay.called.get()
    await receive_message(far)
    await send(far, Stop(kind=1, status=Status.OK))
    assert await answer(near) == Status.OK
    relay.tasks += [asyncio.create_task(work(end)) for end in (near, far) for work in (flood, drain)]
    for _ in range(12):
        await until(lambda: len(clock.waiting) == 2 or relay.status.bytes > MUCH)
        allowed = RATE * (clock.now + BURST_SECONDS)
        assert allowed - 2 * CHUNK_BYTES <= relay.status.bytes <= allowed
        clock.advance(BURST_SECONDS)


async def flood(end: Stream) -> None:
    await end.send(memoryview(bytes(2 * MUCH)))


async def drain(end: Stream) -> None:
    while True:
        await end.receive_some(memoryview(bytearray(CHUNK_BYTES)))


async def answer(end: Stream) -> int:
    status: int = (await receive(end, Hop)).status
    return status


async def test_a_peer_that_asks_many_times_at_once_gets_no_more(relay: Relay, until) -> None:
    relay.here.clear()
    for _ in range(MAX_CIRCUITS_PER_PEER + 5):
        await relay.connect(PEERS[1])
    await until(lambda: relay.status.refused == 5)
    assert relay.status.circuits == MAX_CIRCUITS_PER_PEER


async def test_all_peers_together_get_no_more_circuits_than_there_are(
    relay: Relay, until, monkeypatch
) -> None:
    monkeypatch.setattr(service, "MAX_CIRCUITS_PER_PEER", 1000)
    relay.here.clear()
    for number in range(MAX_CIRCUITS + 5):
        await relay.connect(PEERS[1 + number])
    await until(lambda: relay.status.refused == 5)
    assert relay.status.circuits == MAX_CIRCUITS


async def test_half_of_the_reservations_are_for_peers_met_in_rounds(relay: Relay, monkeypatch) -> None:
    monkeypatch.setattr(service, "MAX_RESERVATIONS", 4)
    relay.gate.met |= dict.fromkeys(PEERS[10:20], 0.0)
    asked = (TARGET, PEERS[1], PEERS[2], *PEERS[10:13], PEERS[1])
    told = [await answer(await relay.ask(peer, Hop(kind=Kind.RESERVE))) for peer in asked]
    full, good = Status.RESERVATION_REFUSED, Status.OK
    assert told == [good, good, full, good, good, full, good]


async def test_several_peers_may_ask_for_a_peer_that_has_gone(relay: Relay) -> None:
    relay.here.clear()
    relay.refusing = True
    ends = [await relay.connect(peer) for peer in PEERS[1:4]]
    relay.here.set()
    assert [await answer(end) for end in ends] == [Status.NO_RESERVATION] * 3
    assert relay.status.reservations == 1, "it may come back"
    await asyncio.gather(*relay.tasks)
    assert relay.status.circuits == 0


@pytest.mark.parametrize("said", [b"\x08", b"\x08\x01\x20\xc9\x01"])
async def test_a_target_that_answers_nonsense_or_no_is_reported(relay: Relay, said: bytes) -> None:
    end = await relay.connect(PEERS[1])
    await send_message(await relay.called.get(), said)
    assert await answer(end) == Status.CONNECTION_FAILED


async def test_a_silent_target_is_reported(relay: Relay, monkeypatch) -> None:
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.05)
    end = await relay.connect(PEERS[1])
    assert await answer(end) == Status.CONNECTION_FAILED


async def test_a_target_that_cannot_be_called_is_reported(relay: Relay, monkeypatch) -> None:
    async def fail(peer: str, protocol: str, seconds: float) -> Stream:
        raise P2pdClientError("p2pd is not running")

    monkeypatch.setattr(relay, "open_stream", fail)
    assert await answer(await relay.connect(PEERS[1])) == Status.CONNECTION_FAILED
