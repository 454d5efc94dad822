from __future__ import annotations

import asyncio

from equipoise.dht import directory
from equipoise.dht.directory import MAX_UNCONNECTED, Publisher
from equipoise.dht.protocol import CallError


async def test_ghosts_do_not_keep_the_news_from_who_is_there(until) -> None:
    ghosts, present = (
        [f"ghost {number:04}" for number in range(4000)],
        [f"peer {number}" for number in range(40)],
    )
    sent: list[str] = []

    async def send(peer: str, records: list[bytes]) -> int:
        sent.append(peer)
        if peer.startswith("ghost"):
            await asyncio.Event().wait()
        return 1

    publisher = Publisher(send, lambda: set(present))
    publisher.publish(b"first", [*ghosts, *present])
    for ghost in ghosts:
        publisher.publish(b"second", [ghost])
    publisher.publish(b"third", [*ghosts, *present])
    await until(lambda: len(publisher._tasks) <= MAX_UNCONNECTED)
    assert set(present) <= set(sent)
    assert sum(peer.startswith("ghost") for peer in sent) <= MAX_UNCONNECTED
    await publisher.close()


async def test_a_farewell_that_did_not_arrive_is_sent_once_more(monkeypatch) -> None:
    monkeypatch.setattr(directory, "RETRY_SECONDS", 0.0)
    sent: list[bytes] = []

    async def send(peer: str, records: list[bytes]) -> int:
        sent.extend(records)
        if len(sent) == 1:
            raise CallError("bob does not answer")
        return 1

    publisher = Publisher(send, set)
    publisher.publish(b"farewell", ["bob"])
    await publisher.close(5.0)
    assert sent == [b"farewell"] * 2
