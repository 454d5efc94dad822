"""Which channel a frame takes: direct ones where there are any, the transport's where there are none."""

from __future__ import annotations

import asyncio
import functools
import itertools
import weakref
from collections.abc import Callable

import pytest

from equipoise.averaging.aio import link as links
from equipoise.averaging.aio import mesh as meshes
from equipoise.averaging.aio.link import Link
from equipoise.averaging.aio.mesh import Mesh
from equipoise.averaging.ports import Channel
from fakes.memory import MemoryTransport, Net

ROUND = b"r" * 16


class Ears:
    """Hears what a mesh hears."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[str, bytes, bytes]] = asyncio.Queue()
        self.losses: asyncio.Queue[tuple[str, str, bool]] = asyncio.Queue()
        self.interruptions: list[str] = []

    def place(self, peer: str, header: bytes, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def frame(self, peer: str, header: bytes, body: memoryview) -> None:
        self.frames.put_nowait((peer, header, bytes(body)))

    def lost(self, peer: str, reason: str, connected: bool) -> None:
        self.losses.put_nowait((peer, reason, connected))

    def interrupted(self, peer: str, reason: str) -> None:
        self.interruptions.append(peer)


class Direct(MemoryTransport):
    """Direct channels in memory; `obstacle` stands in the way of opening one."""

    def __init__(self, net: Net, peer: str) -> None:
        super().__init__(net, peer, True)
        net.transports[peer] = self
        self.obstacle: Callable[[], object] = lambda: None
        self.admitted: dict[str, bytes] = {}
        self.met: list[str] = []
        self.credential = b"credential of " + peer.encode()
        self.opened = 0
        self.dials = asyncio.Event()

    def admit(self, peer: str, credential: bytes) -> None:
        if credential != b"credential of " + peer.encode():
            raise ValueError(f"the credential is not {peer}'s")
        self.admitted[peer] = credential

    def meet(self, peer: str) -> None:
        self.met.append(peer)

    def reaches(self, peer: str) -> bool:
        return peer in self.admitted

    async def open(self, peer: str) -> Channel:
        self.opened += 1
        self.dials.set()
        waiting = self.obstacle()
        if waiting is not None:
            await waiting  # type: ignore[misc]
        return await super().open(peer)


class Pair:
    """Peers a and b, linked by both kinds of channels."""

    def __init__(self) -> None:
        self.libp2p, direct = Net(), Net()
        self.streams = {name: self.libp2p.peer(name)[0] for name in "ab"}
        self.direct = {name: Direct(direct, name) for name in "ab"}
        self.ears = {name: Ears() for name in "ab"}
        self.mesh = {name: Mesh(self.streams[name], self.ears[name], self.direct[name]) for name in "ab"}

    def begin(self, credential: bytes = b"credential of b") -> None:
        self.mesh["a"].enter(ROUND, {"a": b"", "b": credential})

    async def hear(self, count: int) -> list[bytes]:
        return [(await self.ears["b"].frames.get())[1] for _ in range(count)]

    async def stream_then_dial(self) -> asyncio.Future[None]:
        """Two frames by a stream; then a dials b directly, until what is returned has a result."""
        for frame in (b"first", b"second"):
            self.mesh["a"].post("b", frame)
            await self.ears["b"].frames.get()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.direct["a"].obstacle = lambda: answer
        self.begin()
        return answer

    async def stop(self) -> None:
        for one in self.mesh.values():
            await one.stop()


def stall(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Let nothing more through a channel; returns what is set when writing to it begins, and what makes that fail."""
    begun, failing = asyncio.Event(), asyncio.Event()

    async def send(header: bytes, body: bytes = b"") -> None:
        begun.set()
        await failing.wait()
        raise ConnectionError("closed")

    monkeypatch.setattr(channel, "send", send)
    return begun, failing


@pytest.fixture
async def pair():
    pair = Pair()
    yield pair
    await pair.stop()


async def test_a_round_goes_through_direct_channels(pair: Pair) -> None:
    pair.begin()
    pair.mesh["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    pair.mesh["a"].post("b", b"control")
    assert await pair.hear(2) == [b"control", b"bulk"]
    assert not pair.streams["a"].channels


async def test_only_a_round_meets_whom_it_admits(pair: Pair) -> None:
    pair.begin()
    assert pair.direct["a"].met == []
    pair.mesh["a"].meet(["b"])
    assert pair.direct["a"].met == ["b"]


async def test_without_a_round_nobody_is_admitted(pair: Pair) -> None:
    pair.mesh["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    assert not pair.direct["a"].admitted
    assert not pair.direct["a"].channels


async def test_libp2p_carries_what_no_direct_channel_can(pair: Pair) -> None:
    def refuse() -> None:
        raise ConnectionError("firewall")

    pair.direct["a"].obstacle = refuse
    pair.begin()
    pair.mesh["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    pair.begin()
    assert pair.direct["a"].opened == 1, "it was not tried again at once"


async def test_a_dial_that_hangs_holds_frames_up_for_a_moment_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meshes, "DIRECT_SECONDS", 0.01)
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pair.direct["a"].obstacle = lambda: answer
    pair.begin()
    pair.mesh["a"].post("b", b"slow")
    assert await pair.hear(1) == [b"slow"]
    answer.set_result(None)
    dialling = pair.mesh["a"]._links["b"].dialling
    assert dialling is not None
    await dialling
    before = pair.direct["a"].channels[0].delivered
    pair.mesh["a"].post("b", b"fast")
    assert await pair.hear(1) == [b"fast"]
    assert pair.direct["a"].channels[0].delivered > before


async def test_who_is_admitted_is_not_dialled_and_may_dial(pair: Pair) -> None:
    assert pair.mesh["b"].admit("a", b"credential of a")
    assert not pair.mesh["b"].admit("a", b"credential of c")
    assert not pair.mesh["b"].admit("b", b"credential of b"), "that is itself"
    assert set(pair.direct["b"].admitted) == {"a"}
    assert pair.direct["b"].opened == 0
    pair.begin()
    pair.mesh["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    assert pair.direct["b"].channels


async def test_another_peers_credential_admits_nobody(pair: Pair) -> None:
    pair.begin(b"credential of c")
    pair.mesh["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    assert not pair.direct["a"].admitted


async def test_a_broken_direct_channel_is_a_loss_that_libp2p_outlives(pair: Pair) -> None:
    pair.mesh["a"].post("b", b"first")
    await pair.hear(1)
    pair.begin()
    pair.mesh["a"].post("b", b"second")
    await pair.hear(1)
    before = pair.mesh["a"].received("b")
    pair.direct["a"].channels[0].close()
    peer, _, connected = await pair.ears["a"].losses.get()
    assert (peer, connected) == ("b", True)
    assert pair.mesh["a"].received("b") == before
    pair.mesh["a"].post("b", b"third")
    assert await pair.hear(2) == [b"second", b"third"], "what it said last may be lost, and goes first"


async def test_what_a_round_still_wanted_to_send_ends_with_it(pair: Pair) -> None:
    pair.begin()
    pair.mesh["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    pair.mesh["a"].leave(ROUND)
    pair.mesh["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    assert pair.ears["b"].frames.empty()


async def test_an_idle_channel_is_closed_and_nobody_calls_that_a_loss(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.begin()
    pair.mesh["a"].post("b", b"first")
    await pair.hear(1)
    monkeypatch.setattr(meshes, "IDLE_SECONDS", 0.0)
    for _ in range(2):
        pair.mesh["a"]._sweep()
    assert pair.mesh["a"].connected("b"), "a round goes on"
    pair.mesh["a"].leave(ROUND)
    pair.mesh["a"]._sweep()
    pair.mesh["b"].post("a", b"on its way meanwhile")
    assert (await pair.ears["a"].frames.get())[1] == b"on its way meanwhile"
    pair.mesh["a"].post("b", b"second")
    assert await pair.hear(1) == [b"second"]
    assert pair.ears["a"].losses.empty()
    assert pair.ears["b"].losses.empty()


async def test_what_a_stream_may_have_lost_goes_through_the_direct_channel_beside_it(pair: Pair) -> None:
    pair.mesh["a"].post("b", b"first")
    await pair.hear(1)
    pair.begin()
    pair.mesh["a"].post("b", b"second")
    await pair.hear(1)
    pair.mesh["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    pair.streams["a"].channels[0].close()
    assert sorted(await pair.hear(2)) == [b"bulk", b"first"]
    assert pair.ears["a"].losses.empty()


async def test_bulk_that_a_stream_may_have_lost_is_a_loss(pair: Pair) -> None:
    pair.mesh["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    await pair.hear(1)
    pair.begin()
    pair.mesh["a"].post("b", b"second")
    await pair.hear(1)
    pair.streams["a"].channels[0].close()
    assert (await pair.ears["a"].losses.get())[2]


async def test_a_stream_that_breaks_while_a_direct_channel_is_opened_is_no_loss(pair: Pair) -> None:
    answer = await pair.stream_then_dial()
    pair.mesh["a"].post("b", b"third")
    pair.mesh["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    pair.streams["a"].channels[0].close()
    assert (await pair.ears["b"].losses.get())[0] == "a", "b opens none"
    answer.set_result(None)
    assert await pair.hear(4) == [b"first", b"second", b"third", b"bulk"]
    assert pair.ears["a"].losses.empty()
    assert pair.ears["a"].interruptions == ["b"], "what was said outside of rounds, b may have forgotten"


async def test_a_stream_that_broke_is_a_loss_if_no_direct_channel_is_open_in_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meshes, "DIRECT_SECONDS", 0.01)
    await pair.stream_then_dial()
    pair.mesh["a"]._links[
        "b"
    ]._written.clear()  # As if said long ago: nothing is sent again, and so finds it out.
    pair.libp2p.kill("b")
    assert (await pair.ears["a"].losses.get())[::2] == ("b", False)
    assert pair.ears["a"].interruptions == ["b"]


async def test_a_stream_that_breaks_with_bulk_on_its_way_is_a_loss_at_once(pair: Pair) -> None:
    pair.mesh["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    await pair.stream_then_dial()
    pair.streams["a"].channels[0].close()
    assert (await pair.ears["a"].losses.get())[::2] == ("b", False)
    assert not pair.ears["a"].interruptions, "nobody waited for the dial"


async def test_what_a_channel_lost_goes_first_in_order_and_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.mesh["a"].post("b", b"first")
    await pair.hear(1)
    pair.begin()
    for frame in (b"second", b"third"):
        pair.mesh["a"].post("b", frame)
        await pair.hear(1)
    channel = pair.direct["a"].channels[0]
    begun, failing = stall(channel, monkeypatch)
    for frame in (b"being written", b"waiting"):
        pair.mesh["a"].post("b", frame)
    await begun.wait()
    channel.close()
    await pair.ears["a"].losses.get()
    failing.set()  # The reader has noticed first.
    assert await pair.hear(4) == [b"second", b"third", b"being written", b"waiting"]
    pair.mesh["a"].post("b", b"last")
    assert await pair.hear(1) == [b"last"]


async def test_bulk_that_takes_long_to_write_is_lost_with_its_channel(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "SETTLED_SECONDS", 0.0)
    pair.mesh["a"].post("b", b"first")
    await pair.hear(1)
    channel = pair.streams["a"].channels[0]
    begun, failing = stall(channel, monkeypatch)
    pair.mesh["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    await begun.wait()
    pair.begin()
    dialling = pair.mesh["a"]._links["b"].dialling
    assert dialling is not None
    await dialling
    channel.close()
    assert (await pair.ears["a"].losses.get())[::2] == ("b", True)
    failing.set()


@pytest.mark.parametrize("bulk", [False, True])
async def test_what_is_being_written_when_the_other_end_parts_is_not_lost_silently(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, bulk: bool
) -> None:
    pair.mesh["a"].post("b", b"first")
    await pair.hear(1)
    channel = pair.streams["a"].channels[0]
    begun, failing = stall(channel, monkeypatch)
    if bulk:
        pair.mesh["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    else:
        pair.mesh["a"].post("b", b"second")
    await begun.wait()
    pair.mesh["a"]._links["b"].remove(channel)  # As after a farewell.
    failing.set()
    if bulk:
        assert (await pair.ears["a"].losses.get())[0] == "b"
    else:
        assert await pair.hear(1) == [b"second"]


@pytest.mark.parametrize("beside", [True, False])
async def test_what_must_not_come_twice_is_a_loss_instead(pair: Pair, beside: bool) -> None:
    pair.mesh["a"].post("b", b"ask", once=True)
    await pair.hear(1)
    pair.begin()
    if beside:
        pair.mesh["a"].post("b", b"second")
        await pair.hear(1)
    pair.streams["a"].channels[0].close()
    assert (await pair.ears["a"].losses.get())[::2] == ("b", beside)
    pair.mesh["a"].post("b", b"third")
    assert await pair.hear(1) == [b"third"]


async def test_a_stream_that_is_being_opened_anew_is_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await pair.stream_then_dial()
    await pair.direct["a"].dials.wait()
    opening, opened, open_stream = asyncio.Event(), asyncio.Event(), pair.streams["a"].open

    async def open_slowly(peer: str) -> Channel:
        opening.set()
        await opened.wait()
        return await open_stream(peer)

    monkeypatch.setattr(pair.streams["a"], "open", open_slowly)
    link = pair.mesh["a"]._links["b"]
    pair.streams["a"].channels[0].close()
    answer.set_exception(ConnectionError("refused"))
    await opening.wait()
    pair.mesh["a"]._give_up("b", link, link.patience, "its time is over")
    opened.set()
    assert await pair.hear(2) == [b"first", b"second"]
    assert pair.ears["a"].losses.empty()


async def test_frames_wait_no_longer_once_the_peer_has_dialled(pair: Pair) -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pair.direct["a"].obstacle = lambda: never
    pair.begin()
    pair.mesh["a"].post("b", b"control")
    await asyncio.sleep(0)
    pair.mesh["b"].enter(ROUND, {"a": b"credential of a", "b": b""})
    assert await pair.hear(1) == [b"control"]
    assert not pair.streams["a"].channels


async def test_a_daemon_that_stops_waits_for_no_dial_with_its_goodbye(pair: Pair) -> None:
    await pair.stream_then_dial()
    pair.mesh["a"].post("b", b"goodbye")
    await pair.mesh["a"].stop()
    assert await pair.hear(1) == [b"goodbye"]


def test_a_direct_channel_is_tried_again_ever_more_seldom_and_frames_wait_for_the_first_only() -> None:
    link, tried = Link(), []
    for now in range(200):
        if link.dials(float(now), seconds=0.5):
            tried.append((now, link.patience - now))
            link.dialled_in_vain(float(now))
    assert tried[:6] == [(0, 0.5), (1, 0.0), (3, 0.0), (7, 0.0), (15, 0.0), (31, 0.0)]
    assert {second[0] - first[0] for first, second in itertools.pairwise(tried[5:])} == {30}


async def test_what_a_round_has_not_sent_yet_is_let_go_of_with_it(pair: Pair) -> None:
    class Tensors:
        pass

    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pair.direct["a"].obstacle = lambda: never
    pair.begin()
    tensors = Tensors()
    alive = weakref.ref(tensors)
    pair.mesh["a"].post_bulk("b", ROUND, functools.partial(lambda kept: None, tensors))
    del tensors
    await asyncio.sleep(0)
    assert alive() is not None
    pair.mesh["a"].leave(ROUND)
    assert alive() is None
