"""A real listener among strangers: floods, the slow, and noise cost it little and hurt nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket

import psutil
import pytest

from equipoise.dht.address import block_of
from equipoise.dht.direct import listener, transport
from equipoise.dht.direct.errors import Refusals
from equipoise.dht.direct.handshake import PREFACE_BYTES, Preface
from equipoise.dht.direct.listener import MAX_WAITING, WaitingRoom
from equipoise.dht.limits import HANDSHAKES_BURST, HANDSHAKES_PER_SECOND, Handshakes
from fakes.direct import port_of, refused

STRANGERS = 3000
GROWTH_BYTES = 32 * 1024 * 1024
"""Far above what 3,000 strangers leave behind, far below what they would if each left a buffer."""


def test_the_oldest_of_the_greediest_address_goes(monkeypatch) -> None:
    monkeypatch.setattr(listener, "MAX_WAITING", 4)
    gate = WaitingRoom()
    assert [gate.enter(guest, host) for guest, host in enumerate("aabc")] == [None] * 4
    assert gate.enter(4, "d") == 0
    assert gate.enter(5, "b") == 1
    assert gate.enter(6, "e") == 2
    for guest in (3, 3, 4, 5, 6):
        gate.leave(guest)
    assert len(gate) == 0


def test_one_network_of_ipv6_is_one_address(monkeypatch) -> None:
    monkeypatch.setattr(listener, "MAX_WAITING", 3)
    gate = WaitingRoom()
    for guest, host in enumerate(("192.0.2.1", "2001:db8::1", "2001:db8::2%eth0")):
        gate.enter(guest, host)
    assert gate.enter(3, "192.0.2.1") == 1


def test_refusals_take_a_line_a_second_and_reason_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    with caplog.at_level(logging.INFO, "equipoise"):
        for number in range(20_000):
            refusals.note("malformed preface", f"stranger {number}", 100.0 + number / 10_000)
        refusals.note("timeout", "stranger", 101.9999)
    assert [record.getMessage() for record in caplog.records] == [
        "refused: malformed preface: stranger 0",
        "refused: malformed preface: stranger 10000 (and 9999 more for this reason before it)",
        "refused: timeout: stranger",
    ]
    assert refusals.counts == {"malformed preface": 20_000, "timeout": 1}


async def test_slow_strangers_are_bounded_and_others_are_served(peers, dial, monkeypatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 60.0)
    first, second = peers.pair()
    idle = [await dial(second, "127.0.0.2") for _ in range(2 * MAX_WAITING)]
    trickling = [await dial(second, "127.0.0.3") for _ in range(4)]
    for connection in trickling:
        connection.send(b"EQ")
    channel = await first.open(second.peer)
    await channel.send(b"served")
    assert len(second._waiting) <= MAX_WAITING
    assert refused(second)["too many"] >= MAX_WAITING
    for connection in idle[:MAX_WAITING]:
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""


async def test_strangers_have_so_much_time_and_no_more(peers, dial, monkeypatch, until) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 0.1)
    first, second = peers.pair()
    idle, greeted = await dial(second), await dial(second)
    greeted.send(claim("tls", first, second))
    for connection in (idle, greeted):
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    assert refused(second) == {"timeout": 2}
    assert not second._waiting


def test_handshakes_are_bounded_by_block_and_in_all_and_a_quarter_is_for_peers_met() -> None:
    limit, burst = Handshakes({"friend"}), int(HANDSHAKES_BURST)
    assert sum(limit.admits("192.0.2.1", 0.0) for _ in range(burst)) == burst / 2, "a block's share"
    blocks = [f"192.0.2.{number}" for number in range(2, 99)] * 9
    assert sum(limit.admits(block, 0.0) for block in blocks) == burst / 4, "three quarters for all"
    limit.note("192.0.2.1", "friend")
    assert sum(limit.admits("192.0.2.1", 0.0) for _ in range(burst)) == burst / 4, "and one for peers met"
    limit.note("192.0.2.1", "stranger")
    one = sum(limit.admits("192.0.2.1", 10.0 + number / 1000) for number in range(1000))
    assert one <= burst / 2 + HANDSHAKES_PER_SECOND / 4


def test_a_block_of_ipv6_is_a_network() -> None:
    assert block_of("2001:db8::1%eth0") == block_of("2001:db8:0:0:ffff::2") != block_of("2001:db8:0:1::1")
    assert block_of("192.0.2.1") == "192.0.2.1"


async def test_a_listener_fed_with_noise_stays_alive(peers, dial, monkeypatch, until) -> None:
    monkeypatch.setattr(transport, "ADMIT_SECONDS", 0.0)
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 2.0)
    first, second = peers.pair()
    process, rng = psutil.Process(), random.Random(11)
    await _feed(second, [_noise(rng, first, second) for _ in range(100)])
    memory, descriptors = process.memory_info().rss, process.num_fds()
    for _ in range(STRANGERS // 100):
        await _feed(second, [_noise(rng, first, second) for _ in range(100)])
    await until(lambda: not second._waiting)
    assert process.memory_info().rss - memory < GROWTH_BYTES
    assert process.num_fds() <= descriptors + 2
    assert sum(refused(second).values()) == STRANGERS + 100
    assert {"malformed preface", "other version", "other peer", "not a member", "tls failure"} <= set(
        refused(second)
    )
    assert "\n" not in second.status().last_refusal
    channel = await first.open(second.peer)
    await channel.send(b"served")


async def test_a_member_fed_with_noise_after_its_handshake_is_dropped(peers) -> None:
    """Whoever owns the network may write into a connection that is open: the channel ends, and says with whom."""
    first, second = peers.pair()
    for number in range(50):
        await first.open(second.peer)
        channel = await peers.accepted.get()
        (own,) = first.channels._channels
        own._stream._socket.send(random.Random(number).randbytes(1 + number * 20))
        own.close()
        with pytest.raises(ConnectionError, match=f"receive from {first.peer}"):
            await channel.receive(lambda _, size: memoryview(bytearray(size)))
    assert not first.status().channels
    assert not second.status().channels


def claim(layer, member, target) -> bytes:
    """The preface that the member itself would send."""
    return Preface(layer, member.peer, target.peer).encode()


def _noise(rng: random.Random, member, target) -> bytes:
    """What a stranger sends: noise, an altered preface, or a member's preface with noise behind it."""
    preface = bytearray(claim("aead", member, target))
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(PREFACE_BYTES, 400))
    if kind == 1:
        preface[rng.randrange(len(preface))] ^= 1 << rng.randrange(8)
        return bytes(preface) + rng.randbytes(50)
    if kind == 2:
        return bytes(preface[: rng.randrange(len(preface))])
    if kind == 3:
        return bytes(preface) + rng.randbytes(rng.randrange(1, 4000))
    # As TLS begins, with sizes that promise much.
    return bytes(preface) + b"\x16\x03\x01" + rng.randbytes(2) + b"\x01" + rng.randbytes(rng.randrange(2000))


async def _feed(target, noises: list[bytes]) -> None:
    """One stranger after another, each gone once it has said its own."""
    loop = asyncio.get_running_loop()
    for noise in noises:
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.bind(("127.0.0.2", 0))
            await loop.sock_connect(connection, port_of(target))
            with contextlib.suppress(OSError):
                await loop.sock_sendall(connection, noise)
                connection.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(connection, 4096):
                    pass
