"""What a daemon takes of its script's messages, and hands over: bounds, and memory that is lent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.averaging.aio.messenger import Arrived
from equipoise.averaging.messaging.messages import Part
from equipoise.averaging.messaging.receiver import Mailbox, Past
from equipoise.averaging.messaging.sender import Added
from equipoise.peer.control.messages import ReceiveMessage, SendMessage
from equipoise.peer.daemon.script_messages import MAX_RECEIVING, ScriptMessages
from equipoise.peer.errors import Refused
from equipoise.peer.shared_memory import MESSAGE_BYTES, Region

THERE = b"there..."


class Messenger:
    """Notes what is sent, and has the messages that come."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.come: asyncio.Queue[Arrived] = asyncio.Queue()

    def send(self, to: str, topic: str, content: memoryview, added: Added) -> None:
        self.sent.append((to, topic, bytes(content), added))

    async def receive(self, topic: str, timeout: float) -> tuple[Arrived, Past]:
        one = await self.come.get()
        return one, Past(one.peer, one.part.sender, one.part.number, ())


def begun() -> tuple[ScriptMessages, Messenger, Region]:
    messenger, region = Messenger(), Region.create(10)
    router: Any = SimpleNamespace(exchange=lambda *given: messenger)
    joined: Any = SimpleNamespace(run="run", mailbox=Mailbox())
    mates: Any = None
    return ScriptMessages(router, joined, region, mates), messenger, region


def test_a_message_is_read_where_the_script_has_put_it_and_nowhere_else() -> None:
    messages, messenger, region = begun()
    region.sent.take(3)
    piece = region.sent.take(5)
    piece.room(0, 5)[:] = b"hello"
    messages.send(SendMessage("run", "b", "t", piece.at, 5, Added(1)))
    assert messenger.sent == [("b", "t", b"hello", Added(1))]
    for at in (-1, MESSAGE_BYTES - 4):
        with pytest.raises(Refused, match="expected a message within"):
            messages.send(SendMessage("run", "b", "t", at, 5, Added(2)))


async def test_memory_is_lent_until_the_script_gives_it_back() -> None:
    messages, messenger, region = begun()
    for number in (1, 2):
        piece = region.received.take(5)
        messenger.come.put_nowait(Arrived("a", Part("run", THERE, 1, number, "t", 5, 0), piece))
    del piece
    first, second = [await messages.receive(ReceiveMessage("run", "t", 1.0)) for _ in range(2)]
    assert first is not None
    assert second is not None
    assert (first.peer, first.script, first.size, first.past.seen) == ("a", THERE, 5, 1)
    assert region.received.take(5).at not in (first.at, second.at)
    waiting = asyncio.create_task(messages.receive(ReceiveMessage("run", "t", 1.0, (first.at, 7))))
    await asyncio.sleep(0)
    assert region.received.take(5).at == first.at
    waiting.cancel()


async def test_calls_that_wait_are_bounded() -> None:
    messages, _, _ = begun()
    waiting = [
        asyncio.create_task(messages.receive(ReceiveMessage("run", "t", 1.0))) for _ in range(MAX_RECEIVING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="calls wait for messages already"):
        await messages.receive(ReceiveMessage("run", "t", 1.0))
    for task in waiting:
        task.cancel()
