"""A donor that means harm, through the real drivers: what it sends costs its channel, and the others' bytes arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from equipoise.averaging.aio.donor import TRANSFER_FRAME
from equipoise.averaging.ports import Channel
from equipoise.averaging.replication import chunks
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.replication.chunks import Image
from equipoise.averaging.replication.messages import (
    Answer,
    Ask,
    AskItems,
    Item,
    Offer,
    TransferMessage,
    decode,
    encode,
)
from equipoise.limits import Stand
from fakes.cluster import IMAGE, LIMIT, SPEC, STATE, Cluster, Memory
from fakes.speaker import Speaker

NAME, _, DIGESTS = Image.of(memoryview(IMAGE))

Deed = Callable[["Hostile", AskItems], list[tuple[TransferMessage | bytes, bytes]]]
"""What it sends when it is asked for chunks: messages or headers, and bodies."""


class Hostile:
    """Offers what the others do, sends the genuine list of digests, and then does its deed."""

    def __init__(self, cluster: Cluster, deed: Deed) -> None:
        self._transport, self._directory = cluster.net.peer("evil")
        self._transport.serve(self._serve)
        self._deed = deed
        self.asked = 0

    async def come(self) -> None:
        await self._directory.announce(SPEC.name, Stand(state="joined", spec=SPEC.hash))

    async def _serve(self, channel: Channel) -> None:
        speaker = Speaker(channel)
        try:
            await speaker.greet(dialled=False)
            while True:
                header, _ = await speaker.receive()
                if header[:1] == TRANSFER_FRAME:
                    for message, body in self._reply(decode(header[1:])):
                        told = message if isinstance(message, bytes) else TRANSFER_FRAME + encode(message)
                        await speaker.send(told, body)
        except ConnectionError:
            return

    def _reply(self, message: TransferMessage) -> list[tuple[TransferMessage | bytes, bytes]]:
        match message:
            case Ask(run, ticket):
                return [(Answer(run, ticket, STATE.epoch, (), (Offer(STATE, NAME),)), b"")]
            case AskItems(run, ticket, digest, (0,)):
                return [(Item(run, ticket, digest, 0), DIGESTS)]
            case AskItems():
                self.asked += 1
                return self._deed(self, message)
        return []


def genuine(message: AskItems) -> list[tuple[TransferMessage | bytes, bytes]]:
    return [
        (Item(message.run, message.ticket, message.digest, item), IMAGE[NAME.span(item)])
        for item in message.items
    ]


def too_long(evil: Hostile, message: AskItems) -> list[tuple[TransferMessage | bytes, bytes]]:
    return [(head, body + b"more") for head, body in genuine(message)]


def too_short(evil: Hostile, message: AskItems) -> list[tuple[TransferMessage | bytes, bytes]]:
    return [(head, body[:-1]) for head, body in genuine(message)]


def endless(evil: Hostile, message: AskItems) -> list[tuple[TransferMessage | bytes, bytes]]:
    return genuine(message) * 100


def garbage(evil: Hostile, message: AskItems) -> list[tuple[TransferMessage | bytes, bytes]]:
    return [(TRANSFER_FRAME + b"\xff\xff", b"")]


def silent(evil: Hostile, message: AskItems) -> list[tuple[TransferMessage | bytes, bytes]]:
    return []


async def fetch_beside(cluster: Cluster, deed: Deed) -> tuple[Hostile, str]:
    """Fetch from one honest donor and a hostile one, which the honest one's offer makes credible."""
    evil = Hostile(cluster, deed)
    await evil.come()
    giver, newcomer = await cluster.add("honest", "new")
    await giver.donor.offer(STATE, memoryview(IMAGE))
    memory = Memory()
    outcome = await newcomer.fetch(Wish(STATE.epoch, LIMIT), 60.0, memory.room)
    assert outcome.ok, outcome.reason
    assert memory.image == IMAGE
    assert evil.asked, "it had its chance"
    return evil, outcome.reason


@pytest.mark.parametrize("deed", [too_long, too_short, endless, garbage])
async def test_what_breaks_the_protocol_costs_the_channel(cluster: Cluster, deed: Deed) -> None:
    _, reason = await fetch_beside(cluster, deed)
    assert "evil: " in reason


async def test_one_that_sends_nothing_loses_its_chunks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "STALL_SECONDS", 0.05)
    _, reason = await fetch_beside(cluster, silent)
    assert "evil: nothing came from it" in reason
