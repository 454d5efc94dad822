"""Members that find each other, and their records."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from equipoise.dht import messages, p2pd_client
from equipoise.dht import protocol as wire
from equipoise.dht.dialer import Unreached
from equipoise.dht.identity import load_or_create
from equipoise.dht.peer_cache import MEMORY_FILE, PeerCache
from equipoise.dht.records import Kept, Readiness, seal
from equipoise.dht.state import PROTOCOL_VERSION, ReachStatus
from equipoise.dht.swarm import Swarm
from equipoise.limits import Stand

SPEC = "ab12"


async def announce(member: Swarm, run: str = "digits", **changes) -> None:
    values = {"state": "ready", "spec": SPEC, "round": 1}
    await member.directory.announce(run, Stand(**(values | changes)))


def sees(member: Swarm, *others: Swarm, run: str = "digits"):
    async def check() -> bool:
        return {one.peer for one in await member.directory.peers(run)} == {other.peer for other in others}

    return check


async def test_three_find_each_other_and_follow_changes(members, until) -> None:
    first = await members.start("first")
    assert first.status().state == "searching"
    assert "no other peer" in first.status().reason
    others = [await members.start(name, join=first.addresses) for name in ("second", "third")]
    everyone = [first, *others]
    for member in everyone:
        await announce(member)
    for member in everyone:
        await until(sees(member, *everyone))
        assert member.status().state == "ready"
        assert "digits" in member.status().reason
    await announce(others[0], state="joined", round=7, accumulated=2.5)
    for member in everyone:
        await until(lambda member=member: followed(member, others[0]))
    found = {one.peer: one for one in await first.directory.peers("digits")}
    candidate = found[others[0].peer]
    assert (candidate.round, candidate.accumulated, candidate.spec) == (7, 2.5, SPEC)
    assert (candidate.dialable, candidate.ready) == (True, False)
    await others[1].directory.withdraw("digits")
    for member in everyone:
        await until(sees(member, first, others[0]))
    assert others[1].status().state == "joined"


async def followed(member: Swarm, other: Swarm) -> bool:
    return any(one.peer == other.peer and not one.ready for one in await member.directory.peers("digits"))


async def test_a_run_is_seen_by_a_peer_outside_of_it(members, until) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    await announce(first)
    await until(sees(second, first))
    assert not await second.directory.peers("other")


async def test_client_mode_takes_part_but_cannot_be_dialled(members, until) -> None:
    first = await members.start("first")
    client = await members.start("client", join=first.addresses, client_mode=True)
    assert client.addresses == []
    for member in (first, client):
        await announce(member)
    for member in (first, client):
        await until(sees(member, first, client))
    found = {one.peer: one.dialable for one in await first.directory.peers("digits")}
    assert found == {first.peer: True, client.peer: False}
    assert client.peer not in first._protocol.peers


async def admitted(members, until, **options) -> tuple[Swarm, Swarm]:
    """Two in one run, each admitted by the other as in a round."""
    first = await members.start("first")
    second = await members.start("second", join=first.addresses, **options)
    for member in (first, second):
        await announce(member)
    for one, other in ((first, second), (second, first)):
        await until(sees(one, first, second))
        one.direct.admit(other.peer, other.direct.credential)
        one.direct.serve(echo)
    return first, second


async def test_a_peer_with_an_open_direct_channel_is_reached_by_it_whatever_it_says(members, until) -> None:
    first, client = await admitted(members, until, client_mode=True)
    await until(lambda: "a libp2p connection is open; " in first.reach(client.peer).reason)
    assert "client mode" in first.reach(client.peer).reason
    channel = await client.direct.open(first.peer)
    for one, other in ((first, client), (client, first)):
        await until(lambda one=one, other=other: one.direct.channels.having(other.peer))
        assert one.reach(other.peer) == ReachStatus("direct", "a direct channel is open")
    channel.close()
    await until(lambda: "client mode" in first.reach(client.peer).reason)
    await client.stop()
    await until(lambda: no_path(first, client))
    first._protocol.dialer.failures.clear()
    assert first.reach(client.peer).state == "unreachable", "its own word: nobody can dial it"


async def test_a_peer_whose_direct_port_is_closed_is_reached_by_libp2p_with_the_reason(
    members, until
) -> None:
    first, second = await admitted(members, until)
    second.direct._listener.stop()
    with pytest.raises(ConnectionError):
        await first.direct.open(second.peer)
    await until(lambda: first.reach(second.peer).reason.startswith("by libp2p only: "))
    reached = first.reach(second.peer)
    assert reached.state == "direct"
    assert "cannot open a direct channel: 127.0.0.1:" in reached.reason
    (await second.direct.open(first.peer)).close()
    await until(lambda: "direct channel" not in first.reach(second.peer).reason)


async def test_a_peer_that_is_gone_is_unreachable_with_the_reason(members, until) -> None:
    first, second = await admitted(members, until)
    await second.stop()
    await until(lambda: no_path(first, second))
    reached = first.reach(second.peer)
    assert reached.state == "unreachable"
    assert reached.reason.startswith("nobody listens at 127.0.0.1 port ")


async def no_path(member: Swarm, other: Swarm) -> bool:
    try:
        await member._protocol.dialer.reach(other.peer)
    except Unreached:
        return True
    return False


async def test_p2pd_killed_comes_back_as_the_same_peer(members, until) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    for member in (first, second):
        await announce(member)
    await until(sees(first, first, second))
    addresses, pid = first.addresses, first.status().p2pd_pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: first.status().state == "offline")
    assert "SIGKILL" in first.status().reason
    await until(
        lambda: not first._protocol.dialer.connected
    )  # Until the next p2pd has made connections of its own.
    second.transport.serve(echo)
    # It waits for the next p2pd: a round that needs a channel just now must not take the other peer for lost.
    assert (await first.transport.open(second.peer)).peer == second.peer
    await until(lambda: first.status().p2pd_restarts == 1 and first.status().state == "ready")
    assert first.addresses == addresses
    assert first.status().p2pd_pid not in (None, pid)
    await announce(second, state="joined")
    await until(lambda: followed(first, second))
    first.transport.serve(echo)
    await until(lambda: answers(second, first))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOMEM])
async def test_p2pd_comes_back_once_the_machine_can_start_it_again(
    members, until, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def lacks(*command: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    first = await members.start("first")
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", lacks)
        os.kill(first.status().p2pd_pid, signal.SIGKILL)
        await until(lambda: first.status().reason == f"p2pd cannot be started: {os.strerror(number)}")
    await until(lambda: first.status().p2pd_restarts == 1 and first.status().state == "searching")


async def echo(channel) -> None:
    header, _ = await channel.receive(lambda header, size: memoryview(bytearray(size)))
    await channel.send(header)


async def answers(member: Swarm, other: Swarm) -> bool:
    try:
        channel = await member.transport.open(other.peer)
        await channel.send(b"hello")
        await channel.receive(lambda header, size: memoryview(bytearray(size)))
    except ConnectionError:
        return False
    channel.close()
    return True


async def test_a_hung_p2pd_is_replaced(members, until, monkeypatch) -> None:
    monkeypatch.setattr("equipoise.dht.supervisor.WATCH_SECONDS", 0.1)
    first = await members.start("first")
    # How long an answer may take is a default of these functions.
    monkeypatch.setattr(p2pd_client._bounded, "__defaults__", (0.5,))
    os.kill(first.status().p2pd_pid, signal.SIGSTOP)
    await until(lambda: first.status().p2pd_restarts == 1)


async def test_a_silent_peer_is_gone_before_its_record_lapses(members, until, monkeypatch) -> None:
    monkeypatch.setattr("equipoise.dht.records.TTL_SECONDS", 60.0)
    monkeypatch.setattr("equipoise.dht.bootstrap.ANSWER_SECONDS", 0.5)
    monkeypatch.setattr("equipoise.dht.bootstrap.LOOK_SECONDS", 0.1)
    monkeypatch.setattr("equipoise.dht.bootstrap.QUIET_SECONDS", 0.2)
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    for member in (first, second):
        await announce(member)
    await until(sees(first, first, second))
    stopped = psutil.Process(second.status().p2pd_pid)
    try:
        for process in (stopped, *stopped.children(recursive=True)):
            process.suspend()
        await until(lambda: first.status().connected == ())
        await until(sees(first, first))
        assert first.status().state != "joined"
    finally:
        for process in (stopped, *stopped.children(recursive=True)):
            process.resume()
    await until(sees(first, first, second))


async def test_addresses_follow_those_of_the_interfaces(members, until, monkeypatch) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    await until(lambda: first.peer in second.status().connected)
    true = first.addresses

    async def elsewhere() -> list[str]:
        return ["/ip4/192.0.2.9/tcp/4001"]

    with monkeypatch.context() as moved:
        moved.setattr(first._supervisor._link, "identify", elsewhere)
        there = (f"/ip4/192.0.2.9/tcp/4001/p2p/{first.peer}",)
        await until(lambda: second._protocol.dialer.addresses_of(first.peer) == there)
    await until(lambda: first.addresses == true)
    await until(lambda: second._protocol.dialer.addresses_of(first.peer) == tuple(true))


async def test_present_addresses_of_peers_are_remembered(members, until, monkeypatch) -> None:
    monkeypatch.setattr("equipoise.dht.swarm.HOUSEKEEPING_SECONDS", 0.2)
    first = await members.start("first")
    await members.start("second", join=first.addresses)
    kept = members.home("second") / MEMORY_FILE
    await until(lambda: json.loads(kept.read_text())["peers"] == {first.peer: first.addresses})
    # Once it knows that it is dialled, it tells its addresses anew: that must not come after what follows.
    await until(lambda: first.status().reach.state == "direct")
    now = (f"/ip4/192.0.2.9/tcp/4001/p2p/{first.peer}",)
    first._protocol.tell(addresses=now)
    await until(lambda: json.loads(kept.read_text())["peers"] == {first.peer: list(now)})


async def test_a_p2pd_that_takes_no_calls_any_more_is_started_again(members, until) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    first._link._line.close()
    await until(lambda: first.status().p2pd_restarts == 1)
    for member in (first, second):
        await announce(member)
    await until(sees(first, first, second))


async def test_hostile_calls_are_refused_and_change_nothing(members, until, stranger) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    await announce(first)
    await until(lambda: first.peer in second.status().connected)
    empty = messages.encode(second._protocol._message(first.peer))
    record = Readiness(
        version=PROTOCOL_VERSION,
        peer=stranger.peer,
        run="digits",
        sequence=1,
        state="ready",
    )
    good = seal(record, stranger)
    forged = seal(msgspec.structs.replace(record, sequence=2), second.identity)
    deep = empty[:-1] + b"\x91" * 50 + b"\xc0"
    requests = [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (deep, "malformed"),
        (bytes(150_000), "malformed"),
        (messages.encode({**msgspec.msgpack.decode(empty), "records": "x"}), "malformed"),
    ]
    for request, problem in requests:
        with pytest.raises(ConnectionError, match=problem):
            await second._link.call(first.peer, wire.CALL, request)
    for kept in (
        Kept(second.peer, good, 15.0),
        Kept(stranger.peer, good, 1e9),
        Kept(stranger.peer, b"\x91" * 5000, 15.0),
    ):
        await second._protocol.store(first.peer, [kept])
    assert await sees(first, first)()
    genuine = Kept(stranger.peer, good, 15.0)
    assert not first._protocol.intake.store.has(stranger.peer)
    await second._protocol.store(first.peer, [genuine])
    assert first._protocol.intake.store.knows(genuine, time.monotonic())
    await second._protocol.store(first.peer, [Kept(stranger.peer, forged, 15.0)])
    with pytest.raises(ConnectionError, match="has sent a forged record"):
        await second._protocol.store(first.peer, [genuine])


async def test_too_many_calls_are_refused(members, until) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    await until(lambda: first.peer in second.status().connected)
    ping = messages.encode(second._protocol._message(first.peer))

    async def flood() -> None:
        for _ in range(40):
            # Together: one after the other, they are too slow for the bound on a busy machine.
            await asyncio.gather(*(second._link.call(first.peer, wire.CALL, ping) for _ in range(50)))

    with pytest.raises(ConnectionError, match="too many calls"):
        await flood()


async def test_start_and_stop_leave_nothing(members, until) -> None:
    # The loop's own descriptors for child processes come with the first one.
    await (await members.start("warm-up")).stop()
    before = psutil.Process().num_fds()
    member = await members.start("first")
    runtime, pid = member._link.control.parent, member.status().p2pd_pid
    await announce(member)
    await member.stop()
    await member.stop()
    assert not runtime.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert member.status().state == "offline"
    await until(lambda: psutil.Process().num_fds() <= before)


def test_memory_survives_and_distrusts_its_file(tmp_path: Path) -> None:
    peer = load_or_create(tmp_path / "other").peer
    good = {peer: (f"/ip4/127.0.0.1/tcp/1/p2p/{peer}",)}
    memory = PeerCache(tmp_path)
    first = memory.first_sequence
    memory.remember(peer, good[peer])
    memory.save()
    again = PeerCache(tmp_path)
    assert again.peers == good
    assert again.first_sequence > first
    (tmp_path / MEMORY_FILE).write_text('{"starts": 9, "peers": {"x": ["/ip4/nonsense"]}}')
    assert PeerCache(tmp_path).peers == {}
    (tmp_path / MEMORY_FILE).write_text("[" * 100_000)
    assert PeerCache(tmp_path).peers == {}
