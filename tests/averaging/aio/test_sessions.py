"""Sessions on channels: which channel a frame takes, and that a break of any of them loses and repeats nothing."""

from __future__ import annotations

import asyncio
import functools
import itertools
import weakref
from collections.abc import Callable

import pytest

from equipoise.averaging.aio import bandwidth, peer_channels
from equipoise.averaging.aio import sessions as module
from equipoise.averaging.aio.peer_channels import PeerChannels
from equipoise.averaging.aio.sessions import Placed, Sessions
from equipoise.averaging.ports import Buffer, Channel
from equipoise.averaging.session.messages import FAREWELL, FRAME
from fakes.memory import MemoryChannel, MemoryTransport, Net
from fakes.speaker import Speaker

ROUND = b"r" * 16


class Ears:
    """Hears what sessions tell."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[str, bytes, bytes]] = asyncio.Queue()
        self.losses: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()

    def place(self, peer: str, header: bytes, size: int) -> Placed:
        return memoryview(bytearray(size)), functools.partial(self.frame, peer, header)

    def frame(self, peer: str, header: bytes, body: Buffer = b"") -> None:
        self.frames.put_nowait((peer, header, bytes(body)))

    def lost(self, peer: str, reason: str, gone: bool) -> None:
        self.losses.put_nowait((peer, gone))

    @property
    def lost_nothing(self) -> bool:
        return self.losses.empty()


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
        self.sessions = {name: self.start(name) for name in "ab"}

    def start(self, name: str) -> Sessions:
        return Sessions(self.streams[name], self.ears[name], self.direct[name])

    def begin(self, credential: bytes = b"credential of b") -> None:
        self.sessions["a"].enter(ROUND, {"a": b"", "b": credential}, round=True)

    async def hear(self, count: int) -> list[bytes]:
        return [(await self.ears["b"].frames.get())[1] for _ in range(count)]

    async def meet(self, round_id: bytes = b"") -> None:
        """A frame of a to b, which opens their first channel."""
        self.sessions["a"].post("b", b"first", round_id)
        await self.hear(1)

    async def stream_then_dial(self) -> asyncio.Future[None]:
        """Two frames by a stream; then a dials b directly, until what is returned has a result."""
        for frame in (b"first", b"second"):
            self.sessions["a"].post("b", frame)
            await self.ears["b"].frames.get()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.direct["a"].obstacle = lambda: answer
        self.begin()
        return answer

    def punch(self) -> Channel:
        """Hand both the ends of a channel through a hole; returns that of a."""
        there, back = asyncio.Queue(8), asyncio.Queue(8)
        ends = {
            "a": MemoryChannel(self.direct["a"], "b", back, there),
            "b": MemoryChannel(self.direct["b"], "a", there, back),
        }
        for name, channel in ends.items():
            channel.punched = True
            self.sessions[name]._tasks.spawn(self.direct[name].handler(channel))
        return ends["a"]

    def part(self) -> None:
        """Let the transport open no channel between the two any more."""
        self.libp2p.transports.clear()
        for channel in list(self.streams["b"].channels):
            channel.close()

    def heal(self) -> None:
        self.libp2p.transports.update(self.streams)

    async def stop(self) -> None:
        for session in self.sessions.values():
            await session.stop()


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
    pair.sessions["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    pair.sessions["a"].post("b", b"control")
    assert await pair.hear(2) == [b"control", b"bulk"]
    assert not pair.streams["a"].channels


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "libp2p"])
async def test_only_what_direct_channels_deliver_is_measured(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    monkeypatch.setattr(bandwidth, "SAMPLE_SECONDS", 0.0)
    pair.begin(b"credential of b" if direct else b"")
    for _ in range(4):
        pair.sessions["a"].post_bulk("b", ROUND, lambda: (b"bulk", bytes(bandwidth.MIN_BYTES)))
    await pair.hear(4)
    meter = pair.sessions["a"].meter
    meter._measure()
    assert (meter.upload.estimate > 0) == direct, "libp2p swallows megabytes at once"


async def test_only_a_round_meets_the_others_that_it_admits(pair: Pair) -> None:
    pair.sessions["a"].enter(b"transfer", {"b": b"credential of b"})
    assert pair.direct["a"].met == []
    pair.begin()
    assert pair.direct["a"].met == ["b"]


async def test_without_a_round_nobody_is_admitted(pair: Pair) -> None:
    pair.sessions["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    assert not pair.direct["a"].admitted
    assert not pair.direct["a"].channels


async def test_libp2p_carries_what_no_direct_channel_can(pair: Pair) -> None:
    def refuse() -> None:
        raise ConnectionError("firewall")

    pair.direct["a"].obstacle = refuse
    pair.begin()
    pair.sessions["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    pair.begin()
    assert pair.direct["a"].opened == 1, "it was not tried again at once"


async def test_a_dial_that_hangs_holds_frames_up_for_a_moment_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DIRECT_SECONDS", 0.01)
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pair.direct["a"].obstacle = lambda: answer
    pair.begin()
    pair.sessions["a"].post("b", b"slow")
    assert await pair.hear(1) == [b"slow"]
    answer.set_result(None)
    dialling = pair.sessions["a"]._peers["b"].dialling
    assert dialling is not None
    await dialling
    await pair.direct["a"].received(1)
    before = pair.direct["a"].channels[0].delivered
    pair.sessions["a"].post("b", b"fast")
    assert await pair.hear(1) == [b"fast"]
    assert pair.direct["a"].channels[0].delivered > before


async def test_an_admitted_peer_is_not_dialled_and_may_dial(pair: Pair) -> None:
    assert pair.sessions["b"].admit("a", b"credential of a")
    assert not pair.sessions["b"].admit("a", b"credential of c")
    assert not pair.sessions["b"].admit("b", b"credential of b"), "that is itself"
    assert set(pair.direct["b"].admitted) == {"a"}
    assert pair.direct["b"].opened == 0
    pair.begin()
    pair.sessions["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    assert pair.direct["b"].channels


async def test_another_peers_credential_admits_nobody(pair: Pair) -> None:
    pair.begin(b"credential of c")
    pair.sessions["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    assert not pair.direct["a"].admitted


async def test_bulk_that_waits_ends_with_its_round(pair: Pair) -> None:
    pair.begin()
    pair.sessions["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    pair.sessions["a"].leave(ROUND)
    pair.sessions["a"].post("b", b"control")
    assert await pair.hear(1) == [b"control"]
    assert pair.ears["b"].frames.empty()


async def test_frames_wait_no_longer_once_the_peer_has_dialled(pair: Pair) -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pair.direct["a"].obstacle = lambda: never
    pair.begin()
    pair.sessions["a"].post("b", b"control")
    await asyncio.sleep(0)
    pair.sessions["b"].enter(ROUND, {"a": b"credential of a", "b": b""})
    assert await pair.hear(1) == [b"control"]
    assert not pair.streams["a"].channels


async def test_a_daemon_that_stops_waits_for_no_dial_with_its_goodbye(pair: Pair) -> None:
    await pair.stream_then_dial()
    pair.sessions["a"].post("b", b"goodbye")
    await pair.sessions["a"].stop()
    assert await pair.hear(1) == [b"goodbye"]


def test_a_direct_channel_is_tried_again_ever_more_seldom_and_frames_wait_for_the_first_only() -> None:
    link, tried = PeerChannels(b"session"), []
    for now in range(200):
        if link.dials(float(now), seconds=0.5):
            tried.append((now, link.patience - now))
            link.dialled_in_vain(float(now))
    assert tried[:6] == [(0, 0.5), (1, 0.0), (3, 0.0), (7, 0.0), (15, 0.0), (31, 0.0)]
    assert {second[0] - first[0] for first, second in itertools.pairwise(tried[5:])} == {30}


async def test_tensors_of_waiting_bulk_are_freed_with_their_round(pair: Pair) -> None:
    class Tensors:
        pass

    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pair.direct["a"].obstacle = lambda: never
    pair.begin()
    tensors = Tensors()
    alive = weakref.ref(tensors)
    pair.sessions["a"].post_bulk("b", ROUND, functools.partial(lambda kept: None, tensors))
    del tensors
    await asyncio.sleep(0)
    assert alive() is not None
    pair.sessions["a"].leave(ROUND)
    assert alive() is None


@pytest.mark.parametrize("kind", ["streams", "direct"])
async def test_a_channel_that_breaks_between_two_frames_loses_and_repeats_none(pair: Pair, kind: str) -> None:
    if kind == "direct":
        pair.begin()
        pair.sessions["b"].enter(ROUND, {"a": b"credential of a"}, round=True)
    wanted = [b"%d" % number for number in range(20)]
    for number, frame in enumerate(wanted):
        pair.sessions["a"].post("b", frame)
        pair.sessions["b"].post("a", frame)
        if number % 3 == 2:
            for transport in (pair.direct if kind == "direct" else pair.streams).values():
                for channel in transport.channels:
                    channel.close()
        elif number % 3 == 1:
            await asyncio.sleep(0)
    assert await pair.hear(20) == wanted
    assert [(await pair.ears["a"].frames.get())[1] for _ in wanted] == wanted
    assert pair.ears["a"].lost_nothing
    assert pair.ears["b"].lost_nothing
    assert pair.ears["b"].frames.empty()


async def test_bulk_is_made_again_and_what_nobody_wants_any_more_is_passed_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.begin()
    await pair.meet()
    channel = pair.direct["a"].channels[0]
    begun, failing = stall(channel, monkeypatch)
    bodies = [b"as it was"]
    pair.sessions["a"].post_bulk("b", ROUND, lambda: (b"bulk", bodies[-1]))
    await begun.wait()
    bodies.append(b"made again")
    pair.sessions["a"].post("b", b"behind it")
    failing.set()
    assert await pair.ears["b"].frames.get() == ("a", b"bulk", b"made again")
    assert await pair.hear(1) == [b"behind it"]
    begun, failing = stall(pair.direct["a"].channels[-1], monkeypatch)
    pair.sessions["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"unwanted"))
    await begun.wait()
    pair.sessions["a"].leave(ROUND)
    pair.sessions["a"].post("b", b"last")
    failing.set()
    assert await pair.hear(1) == [b"last"]
    assert pair.ears["a"].lost_nothing


async def test_a_peer_that_cannot_be_reached_is_lost_and_is_reached_when_it_is_back(pair: Pair) -> None:
    await pair.meet()
    pair.part()
    assert await pair.ears["a"].losses.get() == ("b", True)
    assert await pair.ears["b"].losses.get() == ("a", True)
    pair.heal()
    pair.sessions["a"].post("b", b"again")
    assert await pair.hear(1) == [b"again"]
    assert pair.ears["a"].lost_nothing


async def test_frames_of_a_round_wait_for_a_member_that_cannot_be_reached_and_others_do_not(
    pair: Pair,
) -> None:
    pair.begin(credential=b"")
    await pair.meet(ROUND)
    pair.part()
    pair.sessions["a"].post("b", b"of the round", ROUND)
    pair.sessions["a"].post("b", b"of no round")
    pair.sessions["a"].post_bulk("b", ROUND, lambda: (b"bulk", b"body"))
    assert await pair.ears["a"].losses.get() == ("b", False)
    pair.heal()
    pair.sessions["a"].beat("b", b"beat")
    assert await pair.hear(3) == [b"beat", b"of the round", b"bulk"]


async def test_a_process_that_begins_anew_gets_what_was_not_sent_and_the_rest_is_lost(pair: Pair) -> None:
    pair.begin(credential=b"")
    await pair.meet(ROUND)
    pair.ears["b"] = Ears()
    before, pair.sessions["b"] = pair.sessions["b"], pair.start("b")
    await before.stop()
    pair.streams["b"].serve(lambda channel: pair.sessions["b"]._accept(channel, False))
    assert await pair.ears["a"].losses.get() == ("b", True), "nobody knows whether the first has heard it"
    pair.sessions["a"].post("b", b"second", ROUND)
    assert await pair.hear(1) == [b"second"]


async def test_a_process_that_begins_anew_is_told_of_though_nothing_was_under_way(pair: Pair) -> None:
    await pair.meet()
    pair.sessions["b"].post("a", b"answer, which acknowledges all that a has sent")
    await pair.ears["a"].frames.get()
    pair.ears["b"] = Ears()
    before, pair.sessions["b"] = pair.sessions["b"], pair.start("b")
    await before.stop()
    pair.streams["b"].serve(lambda channel: pair.sessions["b"]._accept(channel, False))
    pair.sessions["a"].post("b", b"second")
    assert await pair.hear(1) == [b"second"]
    assert pair.ears["a"].losses.get_nowait() == ("b", True)


async def test_a_beat_waits_once_however_often_it_is_posted(pair: Pair) -> None:
    for _ in range(5):
        pair.sessions["a"].beat("b", b"beat")
    pair.sessions["a"].post("b", b"frame")
    assert await pair.hear(2) == [b"beat", b"frame"]
    assert pair.ears["b"].frames.empty()


async def test_an_idle_channel_is_closed_and_nobody_calls_that_a_loss(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.begin()
    await pair.meet()
    monkeypatch.setattr(peer_channels, "IDLE_SECONDS", 0.0)
    for _ in range(2):
        pair.sessions["a"]._sweep()
    assert pair.sessions["a"]._peers["b"].channels, "a round goes on"
    pair.sessions["a"].leave(ROUND)
    if writer := pair.sessions["a"]._peers["b"].writer:
        await writer
    pair.sessions["a"]._sweep()
    pair.sessions["b"].post("a", b"on its way meanwhile")
    assert (await pair.ears["a"].frames.get())[1] == b"on its way meanwhile"
    pair.sessions["a"].post("b", b"second")
    assert await pair.hear(1) == [b"second"]
    for ears in pair.ears.values():
        assert ears.lost_nothing


async def test_a_punched_channel_takes_over_within_a_round_and_idles_for_longer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.direct["a"], "reaches", lambda peer: False)  # It names no address.
    pair.begin()
    pair.sessions["a"].post("b", b"through a relay")
    assert await pair.hear(1) == [b"through a relay"]
    hole = pair.punch()
    await pair.direct["a"].received(1)
    before = hole.delivered
    pair.sessions["a"].post("b", b"through a hole")
    assert await pair.hear(1) == [b"through a hole"]
    assert hole.delivered > before
    pair.sessions["a"].leave(ROUND)
    channels = pair.sessions["a"]._peers["b"]
    monkeypatch.setattr(peer_channels, "IDLE_SECONDS", 0.0)
    for seconds, left in ((peer_channels.PUNCHED_SECONDS, [hole]), (0.0, [])):
        monkeypatch.setattr(peer_channels, "PUNCHED_SECONDS", seconds)
        for _ in range(2):
            while channels.writer:
                await channels.writer
            pair.sessions["a"]._sweep()
        assert channels.channels == left


async def test_however_many_channels_strangers_open_there_is_room_and_others_keep_theirs(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 16)
    sessions = pair.sessions["b"]
    idle = Speaker(await pair.libp2p.peer("idle")[0].open("b"))
    await idle.greet()
    for stranger in range(10):
        transport, _ = pair.libp2p.peer(f"stranger{stranger}")
        for _ in range(4):
            await Speaker(await transport.open("b")).greet()
    assert sum(len(peer.channels) for peer in sessions._peers.values()) == 16
    assert len(sessions._peers["idle"].channels) == 1
    pair.sessions["a"].post("b", b"first")
    assert await pair.hear(1) == [b"first"]
    assert pair.ears["b"].lost_nothing


async def test_strangers_are_dropped_before_peers_of_past_rounds(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 8)
    sessions = pair.sessions["b"]
    sessions.enter(b"round", {"a": b""}, round=True)
    sessions.leave(b"round")
    for stranger in range(20):
        await Speaker(await pair.libp2p.peer(f"stranger{stranger}")[0].open("b")).greet()
    assert list(sessions._peers) == ["a", *(f"stranger{one}" for one in range(13, 20))]
    lost = [pair.ears["b"].losses.get_nowait()[0] for _ in range(pair.ears["b"].losses.qsize())]
    assert lost == [f"stranger{one}" for one in range(13)]


@pytest.mark.parametrize(
    "header",
    [b"", b"R", FRAME + b"\1", FRAME + bytes(16) + b"no hello", FAREWELL + bytes(16), b"H" + bytes(23)],
)
async def test_a_channel_that_begins_with_no_hello_is_closed(pair: Pair, header: bytes) -> None:
    channel = await pair.streams["a"].open("b")
    await channel.send(header)
    with pytest.raises(ConnectionError):
        await channel.receive(lambda header, size: memoryview(bytearray(size)))


async def test_a_frame_that_skips_a_number_or_acknowledges_too_much_ends_the_session(pair: Pair) -> None:
    for number, acknowledged in ((7, 0), (1, 1)):
        speaker = Speaker(await pair.streams["a"].open("b"))
        await speaker.greet()
        await speaker.channel.send(speaker.sealed(b"frame", number, acknowledged))
        assert await pair.ears["b"].losses.get() == ("a", True)


async def test_a_peer_that_acknowledges_nothing_is_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNACKNOWLEDGED", 10)
    speaker = Speaker(await pair.streams["a"].open("b"))
    await speaker.greet()
    for number in range(20):
        pair.sessions["b"].post("a", b"%d" % number)
    assert [(await speaker.receive())[0] for _ in range(10)] == [b"%d" % number for number in range(10)]
    assert await pair.ears["b"].losses.get() == ("a", True)
