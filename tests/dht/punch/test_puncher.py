"""Holes on real sockets: both ends of a coordination in one loop, and what becomes of the channel."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from equipoise.dht.direct import listener
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.handshake import PREFACE_BYTES
from equipoise.dht.direct.listener import ORIGIN_QUESTION
from equipoise.dht.direct.transport import DirectTransport
from equipoise.dht.punch import puncher
from equipoise.dht.punch.candidates import Candidates, encode
from equipoise.dht.punch.puncher import Attempt, SharedPort
from equipoise.dht.streams import Stream, send_message
from equipoise.dht.transport import FramedChannel
from fakes.direct import Peers, introduce, port_of, refused


@pytest.fixture
async def streams() -> AsyncIterator[tuple[Stream, Stream]]:
    pair = [Stream(one) for one in socket.socketpair()]
    yield pair[0], pair[1]
    for one in pair:
        one.close()


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """Somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


class Hidden:
    """Two that do not listen, and a public peer that tells them where they are."""

    def __init__(self, peers: Peers, streams: tuple[Stream, Stream]) -> None:
        self.public = peers.make("public")
        pair = sorted((peers.make(name, listen=()) for name in ("a", "b")), key=lambda one: one.peer)
        self.first, self.second = pair
        self.streams = streams

    def side(self, own: DirectTransport, other: DirectTransport, begins: bool) -> Attempt:
        async def opens(port: SharedPort, place: tuple[str, int]) -> FramedChannel:
            connection = await port.connect(place)
            return await own.punch(other.peer, connection, place, dialled=begins)

        return Attempt(self.streams[not begins], begins, {port_of(self.public): ORIGIN_QUESTION}, opens)

    async def punch(self) -> tuple[FramedChannel, FramedChannel]:
        """Both ends of a channel."""
        first, second = self.side(self.first, self.second, True), self.side(self.second, self.first, False)
        assert await run(first, second) == ["", ""]
        assert first.channel is not None
        assert second.channel is not None
        return first.channel, second.channel


async def run(*sides: Attempt) -> list[str]:
    return await asyncio.gather(*(side.run() for side in sides))


@pytest.fixture
async def hidden(peers: Peers, streams: tuple[Stream, Stream]) -> Hidden:
    return Hidden(peers, streams)


async def said(channel) -> bytes:
    header, _ = await channel.receive(lambda _, size: memoryview(bytearray(size)))
    return header


async def test_both_ends_use_a_channel_through_a_hole(hidden: Hidden, peers: Peers) -> None:
    introduce(hidden.first, hidden.second)
    first, second = await hidden.punch()
    assert peers.accepted.empty()
    for one, other, channel in ((hidden.first, hidden.second, first), (hidden.second, hidden.first, second)):
        one.use(channel)
        assert await peers.accepted.get() is channel
        assert [made.punched for made in one.channels.having(other.peer)] == [True]
        assert not one.reaches(other.peer)
    await first.send(b"a round")
    assert await said(second) == b"a round"
    await second.send(b"and back")
    assert await said(first) == b"and back"
    first.close()
    assert not hidden.first.channels.having(hidden.second.peer)
    with pytest.raises(ConnectionError, match="listens nowhere"):
        await hidden.first.open(hidden.second.peer)


async def test_no_hole_leads_to_a_peer_that_was_not_admitted(
    hidden: Hidden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puncher, "TRY_SECONDS", 0.5)
    hidden.first.admit(hidden.second.peer, hidden.second.credential)
    sides = hidden.side(hidden.first, hidden.second, True), hidden.side(hidden.second, hidden.first, False)
    reasons = await run(*sides)
    assert all(reasons)
    assert "in no group with this peer" in reasons[1]
    assert hidden.first.status().channels == hidden.second.status().channels == 0


async def test_no_hole_leads_to_another_peer_than_was_meant(
    hidden: Hidden, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puncher, "TRY_SECONDS", 0.5)
    third = peers.make("c", listen=())
    introduce(hidden.first, hidden.second, third)
    sides = hidden.side(hidden.first, hidden.second, True), hidden.side(hidden.second, third, False)
    reasons = await run(*sides)
    assert all(reasons)
    assert f"{hidden.first.peer} is where {third.peer} was expected" in reasons[1]


async def test_noise_on_the_relayed_stream_ends_the_attempt(hidden: Hidden) -> None:
    introduce(hidden.first, hidden.second)
    side = hidden.side(hidden.second, hidden.first, False)
    await send_message(hidden.streams[0], b"\xc1noise")
    assert "malformed" in await side.run()


async def test_a_stream_that_ends_ends_the_attempt(hidden: Hidden) -> None:
    introduce(hidden.first, hidden.second)
    side = hidden.side(hidden.second, hidden.first, False)
    await send_message(hidden.streams[0], encode(Candidates(("127.0.0.1", 9999))))
    hidden.streams[0].close()
    assert "the relayed stream has ended" in await side.run()


async def test_everybody_is_told_where_it_comes_from(peers: Peers, dial) -> None:
    public = peers.make("public")
    connection = await dial(public, "127.0.0.9")
    assert await listener.ask_origin(connection) == connection.getsockname()
    assert refused(public) == {}


@pytest.mark.parametrize("place", [("192.0.2.1", 5001), ("2001:db8::1", 1)])
def test_answers_survive_the_wire(place: tuple[str, int]) -> None:
    assert listener.parse_origin(listener.origin_answer(*place)) == place
    assert len(listener.ORIGIN_QUESTION) == PREFACE_BYTES > listener.ORIGIN_BYTES


@pytest.mark.parametrize(
    "answer", [b"", b"x" * listener.ORIGIN_BYTES, listener.origin_answer("192.0.2.1", 0)]
)
def test_an_answer_that_is_none_is_refused(answer: bytes) -> None:
    with pytest.raises(Refused):
        listener.parse_origin(answer)


async def test_connections_of_one_port_leave_from_one_port(peers: Peers) -> None:
    *mirrors, other = [port_of(peers.make(name)) for name in "abc"]
    port = SharedPort()
    places = await port.measure(dict.fromkeys(mirrors, ORIGIN_QUESTION))
    assert places.outside in places.inside
    assert len(places.inside) == 1
    connection = await port.connect(other)
    assert connection.getsockname() == places.outside
    connection.close()
    port.close()


async def test_public_peers_that_say_nothing_are_not_waited_for(silent, monkeypatch) -> None:
    monkeypatch.setattr("equipoise.dht.punch.puncher.MIRROR_SECONDS", 0.1)
    port = SharedPort()
    with pytest.raises(ConnectionError, match="no public peer"):
        await port.measure(dict.fromkeys((silent, ("127.0.0.1", 9)), ORIGIN_QUESTION))
    port.close()


async def test_without_public_peers_nothing_is_known() -> None:
    with pytest.raises(ConnectionError, match="no public peer"):
        await SharedPort().measure({})
