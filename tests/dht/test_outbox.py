from __future__ import annotations

import asyncio

from equipoise.dht.directory import MAX_UNCONNECTED, Outbox


async def test_ghosts_do_not_keep_the_news_from_who_is_there(until) -> None:
    ghosts, present = (
        [f"ghost {number:04}" for number in range(4000)],
        [f"peer {number}" for number in range(40)],
    )
    sent: list[str] = []

    async def send(peer: str, data: bytes) -> bool:
        sent.append(peer)
        if peer.startswith("ghost"):
            await asyncio.Event().wait()
        return True

    outbox = Outbox(send, lambda: set(present))
    outbox.publish(b"first", [*ghosts, *present])
    for ghost in ghosts:
        outbox.publish(b"second", [ghost])
    outbox.publish(b"third", [*ghosts, *present])
    await until(lambda: len(outbox._tasks) <= MAX_UNCONNECTED)
    assert set(present) <= set(sent)
    assert sum(peer.startswith("ghost") for peer in sent) <= MAX_UNCONNECTED
    await outbox.close()
