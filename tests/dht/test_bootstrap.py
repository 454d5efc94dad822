"""Not being in the swarm is a state with a reason, and it ends by itself."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from equipoise.dht import messages
from equipoise.dht import protocol as wire
from equipoise.dht.dialer import GREETING, Unreached, probe
from equipoise.dht.identity import load_or_create
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.dht.swarm import Swarm
from equipoise.limits import Stand


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def announce(member: Swarm) -> None:
    await member.directory.announce("digits", Stand(spec="ab", state="ready", round=1))


def sees(member: Swarm, count: int):
    async def check() -> bool:
        return len(await member.directory.peers("digits")) == count

    return check


async def test_a_dead_address_is_a_reason_and_is_joined_when_it_comes_alive(
    members, until, port: int
) -> None:
    seed = load_or_create(members.home("seed"))
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{seed.peer}"
    member = await members.start("member", join=[address])
    await until(lambda: member.status().bootstrap[0].state == "refused")
    status = member.status()
    assert status.state == "searching"
    assert f"127.0.0.1 port {port} (connection refused)" in status.reason
    assert status.bootstrap[0].address == address
    await members.start("seed", listen=[f"/ip4/127.0.0.1/tcp/{port}"])
    await until(lambda: member.status().state == "joined")
    await until(lambda: member.status().bootstrap[0].state == "connected")


async def test_islands_merge_when_their_common_address_appears(members, until, port: int) -> None:
    seed = load_or_create(members.home("seed"))
    dead = f"/ip4/127.0.0.1/tcp/{port}/p2p/{seed.peer}"
    left = await members.start("left", join=[dead])
    left_too = await members.start("left too", join=[dead, *left.addresses])
    right = await members.start("right", join=[dead])
    islanders = [left, left_too, right]
    for member in islanders:
        await announce(member)
    await until(sees(left, 2))
    await until(sees(left_too, 2))
    assert await sees(right, 1)()
    await members.start("seed", listen=[f"/ip4/127.0.0.1/tcp/{port}"])
    for member in islanders:
        await until(sees(member, 3))


async def test_a_seed_that_returns_without_addresses_is_found_again(members, until, port: int) -> None:
    listen = [f"/ip4/127.0.0.1/tcp/{port}"]
    seed = await members.start("seed", listen=listen)
    member = await members.start("member", join=seed.addresses)
    await until(lambda: member.status().state == "joined")
    await announce(member)
    await seed.stop()
    await until(lambda: member.status().state == "searching")
    back = await members.start("seed", listen=listen)
    await until(lambda: member.status().state == "ready")
    await until(lambda: back.status().state == "joined")
    await until(sees(back, 1))


async def test_another_peer_at_the_address(members, until, stranger) -> None:
    first = await members.start("first")
    wrong = first.addresses[0].replace(first.peer, stranger.peer)
    member = await members.start("member", join=[wrong])
    await until(lambda: member.status().bootstrap[0].state == "wrong peer")
    assert f"{first.peer} answers at" in member.status().reason
    assert f"expected {stranger.peer}" in member.status().reason


async def test_another_protocol_version(members, until) -> None:
    first = await members.start("first")
    later = messages.Message(version=PROTOCOL_VERSION + 1, serves=True)
    first._protocol._message = lambda peer, **content: later
    member = await members.start("member", join=first.addresses)
    await until(lambda: member.status().bootstrap[0].state == "other version")
    assert "its equipoise is newer" in member.status().reason
    assert "upgrade this machine's with pip install --upgrade equipoise" in member.status().reason


async def test_a_newer_caller_is_told_which_side_is_older(members, until) -> None:
    first = await members.start("first")
    member = await members.start("member", join=first.addresses)
    await until(lambda: first.peer in member.status().connected)
    newer = messages.encode(messages.Message(version=PROTOCOL_VERSION + 1, serves=True))
    answer = await member._link.call(first.peer, wire.CALL, newer)
    assert msgspec.msgpack.decode(answer) == {"version": PROTOCOL_VERSION}


def test_which_side_is_older_is_said() -> None:
    for version, said in (
        (PROTOCOL_VERSION + 1, "newer.*upgrade this"),
        (PROTOCOL_VERSION - 1, "older.*have it"),
    ):
        with pytest.raises(messages.VersionError, match=said):
            messages.decode(messages.encode(messages.Versioned(version=version)), messages.messages)


async def test_a_greeting_that_is_not_libp2ps_is_told_as_such() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        with pytest.raises(Unreached, match=r"^what answers at .* is not a libp2p peer$") as caught:
            await probe("127.0.0.1", server.sockets[0].getsockname()[1], GREETING)
    assert caught.value.state == "wrong peer"


async def test_silence_and_unknown_names_are_told_apart(monkeypatch) -> None:
    monkeypatch.setattr("equipoise.dht.dialer.PROBE_SECONDS", 0.05)
    with socket.socket() as full:
        # A listener whose queue is full answers nothing.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        with pytest.raises(Unreached, match="nobody answers") as caught:
            await probe("127.0.0.1", full.getsockname()[1])
        assert caught.value.state == "timeout"
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "unresolved"),
        (OSError(101, "Network is unreachable"), "no network"),
        (ConnectionRefusedError(111, "Connection refused"), "refused"),
        (OSError(5, "Input/output error"), "failed"),
    ],
)
async def test_causes_have_names(monkeypatch, error: OSError, state: str) -> None:
    async def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(asyncio, "open_connection", fail)
    with pytest.raises(Unreached) as caught:
        await probe("seed.example.org", 1)
    assert caught.value.state == state
    assert str(caught.value).isprintable()


async def test_no_network_is_offline(members, until, monkeypatch) -> None:
    async def fail(*args: object) -> None:
        raise OSError(101, "Network is unreachable")

    first = await members.start("first")
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "open_connection", fail)
        member = await members.start("member", join=first.addresses)
        await until(lambda: member.status().bootstrap[0].state == "no network")
        assert member.status().state == "offline"
        assert "no network route" in member.status().reason
    await until(lambda: member.status().state == "joined")
