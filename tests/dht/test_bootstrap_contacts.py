"""A peer that has fallen silent is asked, and given up after two questions without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.dht import bootstrap
from equipoise.dht.bootstrap import ASKED_A_SECOND, MAX_ASKED, MAX_MISSED, QUIET_SECONDS, Contacts
from equipoise.dht.protocol import CallError


class World:
    """p2pd, the protocol and the dialer, as far as contacts know them; `now` is their time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(bootstrap, "ANSWER_SECONDS", 0.01)
        monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.asked: list[str] = []
        self.gone: list[str] = []
        self.buried: list[str] = []
        self.closed: list[str] = []
        self.answer: Any = None
        self.dialer = SimpleNamespace(connected=frozenset(), refresh=self._nothing)
        self.protocol = SimpleNamespace(
            dialer=self.dialer,
            ping=self._ping,
            lose=self.gone.append,
            intake=SimpleNamespace(store=SimpleNamespace(bury=lambda peer, now: self.buried.append(peer))),
        )
        self.link = SimpleNamespace(attached=True, disconnect=self._disconnect)
        self.contacts = Contacts(self.link, self.protocol)  # type: ignore[arg-type]

    def hear(self, peer: str, now: float) -> None:
        self.now = now
        self.dialer.connected |= {peer}
        self.contacts.hear(peer)

    async def look(self, now: float) -> list[str]:
        """Return the peers that are asked, once all questions are over."""
        self.now, self.asked = now, []
        self.contacts._look(now)
        await self.contacts._questions.join()
        return self.asked

    async def _ping(self, peer: str) -> None:
        self.asked.append(peer)
        if self.answer is None:
            self.contacts.hear(peer)
        elif isinstance(self.answer, Exception):
            raise self.answer
        else:
            await self.answer(peer)

    async def _disconnect(self, peer: str) -> None:
        self.closed.append(peer)

    async def _nothing(self, *_: object) -> None:
        pass


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    world = World(monkeypatch)
    yield world
    await world.contacts._questions.stop()


async def never(peer: str) -> None:
    await asyncio.Event().wait()


async def test_only_the_silent_are_asked(world: World) -> None:
    world.hear("a", 0.0)
    world.hear("b", QUIET_SECONDS - 1)
    assert await world.look(QUIET_SECONDS) == ["a"]
    assert await world.look(QUIET_SECONDS + 0.5) == []


async def test_two_missed_answers_in_a_row_end_a_contact(world: World) -> None:
    world.hear("a", 0.0)
    world.answer = never
    assert await world.look(10.0) == ["a"] * MAX_MISSED
    assert world.gone == world.buried == world.closed == ["a"]


async def test_a_peer_that_calls_or_is_reported_unreachable_is_not_given_up(world: World) -> None:
    async def calls(peer: str) -> None:
        world.now += 1.0
        world.contacts.hear(peer)
        await never(peer)

    world.hear("a", 0.0)
    for answer, questions in ((calls, MAX_MISSED), (CallError("no way"), 1)):
        world.answer = answer
        assert await world.look(world.now + 10.0) == ["a"] * questions
    assert world.gone == []
    assert await world.look(world.now) == []


async def test_no_peer_is_asked_twice_at_a_time(world: World) -> None:
    world.hear("a", 0.0)
    world.answer = never
    world.contacts._look(10.0)
    world.contacts._look(20.0)
    assert len(world.contacts._questions) == 1


async def test_a_peer_that_is_not_connected_is_forgotten(world: World) -> None:
    world.hear("a", 0.0)
    world.dialer.connected = frozenset()
    assert await world.look(20.0) == []
    world.dialer.connected = frozenset("a")
    assert await world.look(20.0) == []


async def test_all_peers_are_asked_in_doubt(world: World) -> None:
    world.hear("a", 0.0)
    world.hear("b", 1.0)
    world.contacts.doubt()
    assert sorted(await world.look(1.0)) == ["a", "b"]


async def test_a_large_swarm_is_asked_a_few_at_a_time_the_longest_silent_first(world: World) -> None:
    peers = [f"p{number:03}" for number in range(5 * MAX_ASKED)]
    for number, peer in enumerate(reversed(peers)):
        world.hear(peer, number / 1000)
    world.answer = never
    world.contacts._look(100.0)
    world.contacts._look(100.0)
    await asyncio.sleep(0)
    assert world.asked == peers[::-1][:MAX_ASKED]


async def test_peers_of_a_large_swarm_may_be_silent_for_longer(world: World) -> None:
    peers = [f"p{number:02}" for number in range(10 * ASKED_A_SECOND)]
    for peer in peers:
        world.hear(peer, 0.0)
    assert await world.look(9.9) == []
    assert await world.look(10.0) == peers[:MAX_ASKED]
