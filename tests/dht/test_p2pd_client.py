"""Streams that p2pd hands over: bounded, and closed whatever becomes of them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import base58
import pytest

from equipoise.dht.hivemind_imports import Multiaddr, p2pd_pb2
from equipoise.dht.identity import peer_of
from equipoise.dht.p2pd_client import PEERS_SHARE, P2pdClientError, StreamListener
from equipoise.dht.streams import Stream, StreamClosed, connect_unix, receive_message, send_message

PEER, OTHER = (peer_of(bytes([number]) * 32) for number in (1, 2))


class Door:
    """An `StreamListener` on a socket of its own, with p2pd's part played here."""

    def __init__(self, path: Path, most: int) -> None:
        self.listener = StreamListener(path)
        self.listener.ways["/test"] = most, self.handle
        self.entered: list[str] = []
        self.leave = asyncio.Event()
        self.error: Exception | None = None
        self.ends: list[Stream] = []
        self._path = path

    async def handle(self, peer: str, relayed: bool, stream: Stream) -> None:
        self.entered.append(peer)
        if self.error is not None:
            raise self.error
        await self.leave.wait()

    async def knock(self, peer: str) -> Stream:
        end = await connect_unix(str(self._path))
        self.ends.append(end)
        info = p2pd_pb2.StreamInfo(
            peer=base58.b58decode(peer), addr=Multiaddr("/ip4/127.0.0.1/tcp/1").to_bytes(), proto="/test"
        )
        await send_message(end, info.SerializeToString())
        return end


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    door = Door(tmp_path / "s", 2 * PEERS_SHARE)
    door.listener.listen()
    yield door
    await door.listener.stop()
    for end in door.ends:
        end.close()


async def closed(end: Stream) -> bool:
    with pytest.raises(StreamClosed):
        await receive_message(end)
    return True


async def test_no_peer_takes_more_than_its_share(door: Door, until) -> None:
    for _ in range(2):
        await door.knock(PEER)
    await until(lambda: len(door.entered) == 2)
    assert await closed(await door.knock(PEER))
    await door.knock(OTHER)
    await until(lambda: door.entered == [PEER, PEER, OTHER])
    door.leave.set()
    await until(lambda: not door.listener._open)


@pytest.mark.parametrize("error", [P2pdClientError("p2pd is gone"), TimeoutError(), ValueError("x")])
async def test_weather_in_a_handler_is_no_error(door: Door, caplog, error: Exception) -> None:
    door.error = error
    assert await closed(await door.knock(PEER))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_fault_in_a_handler_is_logged(door: Door, caplog) -> None:
    door.error = KeyError("x")
    assert await closed(await door.knock(PEER))
    assert "failed" in caplog.text


async def test_a_stream_that_was_not_begun_with_is_closed(door: Door) -> None:
    near, far = socket.socketpair()
    with near:
        door.listener._take(far, "")
        await door.listener.stop()
        near.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(near, 1) == b""


async def test_without_descriptors_it_pauses_and_goes_on(door: Door, until, monkeypatch, caplog) -> None:
    monkeypatch.setattr("equipoise.dht.streams.PAUSE_SECONDS", 0.05)
    acceptor = door.listener._acceptor
    assert acceptor is not None
    listening = acceptor.socket
    acceptor.socket = cast(socket.socket, _Exhausted(listening.fileno()))
    acceptor._accept()
    assert "cannot accept connections" in caplog.text
    assert not asyncio.get_running_loop().remove_reader(listening), "it is not watched for the while"
    acceptor.socket = listening
    await door.knock(PEER)
    await until(lambda: door.entered == [PEER])


class _Exhausted:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def accept(self) -> None:
        raise OSError(errno.EMFILE, "Too many open files")
