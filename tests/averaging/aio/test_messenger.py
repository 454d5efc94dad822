"""Messages between scripts through routers, over a network in memory that breaks, and beside rounds."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
import torch

from equipoise.averaging.aio import messenger as module
from equipoise.averaging.aio.messenger import MESSAGE_FRAME, PART_BYTES, Messenger
from equipoise.averaging.aio.round_driver import ROUND_FRAME
from equipoise.averaging.messaging import messages, receiver
from equipoise.averaging.messaging.receiver import Mailbox
from equipoise.averaging.messaging.sender import Added
from equipoise.averaging.options import RunOptions
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from fakes.cluster import Cluster, company, until
from fakes.hostile import Frame, run_at_once
from fakes.vectors import averaged

RUN = "run"


class Held:
    """Memory of a message."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)

    def room(self, start: int, size: int) -> memoryview:
        return memoryview(self.bytes)[start : start + size]


async def exchange(cluster: Cluster, *names: str, terms: dict[str, str] | None = None) -> list[Messenger]:
    """Messengers of peers that know each other; those of `terms` do not."""
    found = []
    for name in names:
        router = cluster.routers[name]

        async def mates(sends: bool, name: str = name) -> dict[str, bytes]:
            return {one: b"" for one in names if one != name}

        found.append(router.exchange(RUN, Mailbox(name.encode().ljust(8)), mates, Held))
    return found


async def read(messenger: Messenger, topic: str = "t") -> bytes:
    got = await messenger.receive(topic, 20.0)
    assert got is not None
    memory: Any = got[0].memory
    return bytes(memory.bytes)


@pytest.mark.parametrize("seed", range(4))
async def test_messages_of_any_length_arrive_in_order_over_channels_that_break(
    cluster: Cluster, seed: int
) -> None:
    cluster.net.loss, cluster.net.chance = 0.1, Random(seed)
    for name in "ab":
        cluster.host(name)
    a, b = await exchange(cluster, "a", "b")
    sizes = [1, 7, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 5] * 6
    sent = [bytes([index]) * size for index, size in enumerate(sizes)]
    for number, content in enumerate(sent, 1):
        a.send("b", "t", memoryview(content), Added(number))
    assert [await read(b) for _ in sent] == sent
    told: list[tuple[int, str]] = []
    while len(told) < 2 * len(sent) + 1:
        told += [(one.number, one.how) for one in await a.notices()]
    assert set(told) == {(0, "met")} | {
        (n + 1, how) for n in range(len(sent)) for how in ("acknowledged", "read")
    }
    assert await b.receive("t", 0.0) is None


async def test_a_round_goes_before_messages_on_one_link(cluster: Cluster) -> None:
    order: list[bytes] = []

    def tap(to: str, header: bytes, body: bytes) -> list[Any]:
        if len(body) > 1000:
            order.append(header[:1])
        return [(header, body)]

    cluster.taps["a"] = tap
    options = RunOptions(codec="fp32", part_values=256)
    spec = RunSpec.create("rounds", Schema.of({"w": torch.zeros(200_000)}), options)
    runs = [await cluster.host(name).join(spec) for name in "ab"]
    await company(runs)
    a, b = await exchange(cluster, "a", "b")
    for number in range(1, 33):
        a.send("b", "t", memoryview(bytes(4 * PART_BYTES)), Added(number))
    await read(b)
    given = [torch.ones(200_000), torch.zeros(200_000)]
    out = [torch.empty(200_000) for _ in runs]
    outcomes = await asyncio.gather(
        *(averaged(run, own, to, 1.0, 20.0) for run, own, to in zip(runs, given, out, strict=True))
    )
    assert all(outcome.ok for outcome in outcomes)
    assert order.count(MESSAGE_FRAME) < 32 * 4, "the round did not wait for all messages"
    assert ROUND_FRAME in order
    assert len([await read(b) for _ in range(31)]) == 31


async def test_strangers_and_scripts_that_are_not_there_are_turned_away(cluster: Cluster) -> None:
    for name in "abc":
        cluster.host(name)
    a, _ = await exchange(cluster, "a", "b")
    stranger = cluster.routers["c"]

    async def all_mates(sends: bool) -> dict[str, bytes]:
        return {"a": b"", "b": b""}

    c = stranger.exchange(RUN, Mailbox(b"c" * 8), all_mates, Held)
    c.send("a", "t", memoryview(b"hello"), Added(1))
    await until(lambda: c._outgoing["a"].machine._why.startswith("this peer knows of no such peer"))
    assert await a.receive("t", 0.0) is None
    elsewhere = stranger.exchange("elsewhere", Mailbox(b"c" * 8), all_mates, Held)
    elsewhere.send("a", "t", memoryview(b"hello"), Added(1))
    await until(lambda: elsewhere._outgoing["a"].machine._why == "its daemon has no script in this run")


async def test_parts_that_nobody_asked_for_take_no_memory(cluster: Cluster) -> None:
    cluster.host("a")
    (a,) = await exchange(cluster, "a")
    part = messages.Part(RUN, b"x" * 8, 1, 1, "t", 2**28, 0)
    before = len(a._sessions._scratch)
    room, take = a.place("x", part, 1000)
    take(room)
    assert len(a._sessions._scratch) >= before
    assert not a._growing
    with pytest.raises(FrameRefused, match="expected a body only within a message"):
        a.place("x", messages.Part(RUN, b"x" * 8, 1, 1, "t", 10, 8), 3)
    with pytest.raises(FrameRefused, match="expected a body only within a message"):
        a.place("x", messages.Open(RUN, b"x" * 8), 3)


def test_a_peer_that_falls_silent_with_room_holds_others_up_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 400)
    monkeypatch.setattr(receiver, "MAX_WAITING_BYTES", 1000)
    parts = 0

    def first_part_alone(to: str, header: bytes, body: bytes) -> list[Frame]:
        nonlocal parts
        parts += bool(body)
        return [] if body and 2 <= parts <= 3 else [(header, body)]

    async def act() -> None:
        cluster, clock = Cluster(), asyncio.get_running_loop().time
        cluster.taps["m"] = first_part_alone
        for name in "abm":
            cluster.host(name)
        a, b, m = await exchange(cluster, *"abm")
        m.send("a", "t", memoryview(b"m" * 900), Added(1))
        await until(lambda: parts == 3)
        b.send("a", "t", memoryview(b"b" * 500), Added(1))
        began = clock()
        got = await a.receive("t", 2 * receiver.STALL_SECONDS)
        assert got is not None
        assert (got[0].peer, clock() - began <= receiver.STALL_SECONDS + 1) == ("b", True)
        assert await read(a) == b"m" * 900, "it was sent anew"
        await cluster.stop()

    assert run_at_once(act()) == []
