"""Relays: members in client mode reach each other through one, and only through one that carries enough."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.dht.address import parse_address
from equipoise.dht.autonat import Answer, stands_in
from equipoise.dht.limits import BURST_SECONDS, TokenBucket
from equipoise.dht.p2pd_client import P2pdClientError
from equipoise.dht.records import Readiness
from equipoise.dht.relay import service
from equipoise.dht.relay.service import (
    HOP_PROTOCOL,
    Hop,
    Kind,
    Status,
    Stop,
    decode,
    describe,
    receive,
)
from equipoise.dht.sanitize import Malformed
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.dht.streams import StreamClosed, receive_message, send_message
from equipoise.dht.swarm import Swarm

RATE = 12.5e6
"""Bytes a second that a relay carries."""

P2PD_ANSWER = bytes.fromhex("0802" + "1a0a0880c486d80612020102" + "220608781080800828" + "64")
"""p2pd's own answer to a reservation, its addresses and voucher cut short: 2 minutes and 128 KiB."""


def test_the_answer_of_p2pd_is_understood() -> None:
    found = decode(P2PD_ANSWER, Hop)
    assert (found.kind, found.status, found.reservation.expires) == (Kind.STATUS, Status.OK, 1795269120)
    assert (found.limit.seconds, found.limit.bytes) == (120, 131072)
    assert not found.peer.id


@given(
    kind=st.sampled_from(Kind),
    peer=st.binary(max_size=64),
    limit=st.none()
    | st.fixed_dictionaries({"seconds": st.integers(0, 2**31), "bytes": st.integers(0, 2**60)}),
    status=st.sampled_from([0, *Status]),
)
def test_messages_survive_the_wire(
    kind: Kind, peer: bytes, limit: dict[str, int] | None, status: int
) -> None:
    for made in (Hop, Stop):
        message = made(kind=kind, peer={"id": peer}, limit=limit, status=status)
        found = decode(message.SerializeToString(), made)
        assert (found.kind, found.peer.id, found.status) == (kind, peer, status)
        assert found.HasField("limit") == (limit is not None)
        assert limit is None or {"seconds": found.limit.seconds, "bytes": found.limit.bytes} == limit


@pytest.mark.parametrize("data", [b"\x08", b"\x0a\x7f", b"\x08" + b"\xff" * 10])
def test_torn_and_oversized_messages(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data, Hop)


def test_a_status_in_words() -> None:
    assert describe(Status.NO_RESERVATION) == "no reservation"
    assert describe(7) == "status 7"
    assert decode(Stop(kind=1, status=100).SerializeToString(), Stop).status == 100


async def test_an_allowance_is_never_exceeded() -> None:
    loop = asyncio.get_running_loop()
    rate, taken = 1e6, 0
    allowance = TokenBucket(rate)
    began = loop.time()

    async def take() -> None:
        nonlocal taken
        for _ in range(10):
            await allowance.take(10_000)
            taken += 10_000
            assert taken <= rate * (loop.time() - began + BURST_SECONDS) + 1

    await asyncio.gather(*(take() for _ in range(4)))
    assert loop.time() - began >= 0.4 - BURST_SECONDS


def record(reach: str, dialable: bool) -> Readiness:
    return Readiness(
        version=PROTOCOL_VERSION,
        peer="p",
        run="r",
        sequence=1,
        state="joined",
        reach=reach,
        dialable=dialable,
    )


def test_relayed_peers_stand_in_only_among_themselves() -> None:
    relayed, standing_in = record("relayed", False), record("relayed", True)
    direct, client, new = record("direct", True), record("unreachable", False), record("unknown", True)
    assert not stands_in([])
    assert stands_in([relayed])
    assert stands_in([standing_in, client])
    assert not stands_in([standing_in, direct])
    assert not stands_in([relayed, new])


# ---- with p2pd ----


def relayed(member: Swarm) -> bool:
    return member.reach(member.peer).state == "relayed"


async def reaches(member: Swarm, other: Swarm) -> bool:
    try:
        channel = await member.transport.open(other.peer)
    except ConnectionError:
        return False
    channel.close()
    return True


async def test_members_in_client_mode_reach_each_other_through_a_relay(members, until) -> None:
    relay = await members.start("relay", relay=True, relay_bandwidth=RATE)
    first = await members.start("first", join=relay.addresses, client_mode=True)
    second = await members.start("second", join=relay.addresses, client_mode=True)
    await until(lambda: relayed(first) and relayed(second))
    received = asyncio.get_running_loop().create_future()

    async def serve(channel) -> None:
        received.set_result(await channel.receive(lambda header, size: memoryview(bytearray(size))))

    second.transport.serve(serve)
    first._protocol.dialer.learn(second.peer, second.addresses)
    channel = await first.transport.open(second.peer)
    await channel.send(b"header", bytes(300_000))
    header, body = await received
    assert (header, len(body)) == (b"header", 300_000)

    relaying = relay.status().reach.relaying
    assert (relaying.reservations, relaying.circuits, relaying.refused) == (2, 1, 0)
    assert relaying.bytes > 300_000
    assert first.status().reach.relays == (relay.peer,)
    assert not first.transport.dialable


async def test_a_relayed_member_survives_its_p2pd(members, until) -> None:
    relay = await members.start("relay", relay=True, relay_bandwidth=RATE)
    hidden = await members.start("hidden", join=relay.addresses, client_mode=True)
    other = await members.start("other", join=relay.addresses, client_mode=True)
    await until(lambda: relayed(hidden) and relayed(other))
    other._protocol.dialer.learn(hidden.peer, hidden.addresses)
    for member in (hidden, relay):
        os.kill(member.status().p2pd_pid, signal.SIGKILL)
        await until(lambda member=member: member.status().p2pd_restarts == 1)
        await until(lambda: relayed(hidden) and relay.peer in hidden.status().connected)
        await until(lambda: reaches(other, hidden))


async def test_no_peer_relays_unasked(members, until) -> None:
    """p2pd would: without a file that forbids it, it relays 128 KiB at a time for any stranger."""
    public = await members.start("public")
    hidden = await members.start("hidden", join=public.addresses, client_mode=True)
    await until(lambda: hidden.status().state == "joined")
    with pytest.raises(P2pdClientError, match="protocols not supported"):
        await hidden._reach.relays._reserve(public.peer)
    assert hidden.status().reach.state == "unreachable"
    assert "no peer that it has met relays" in hidden.status().reach.reason
    assert public.status().reach.relaying is None


async def test_a_relay_leads_only_to_those_who_asked(members, until) -> None:
    relay = await members.start("relay", relay=True, relay_bandwidth=RATE)
    client = await members.start("client", join=relay.addresses, client_mode=True)
    await until(lambda: relayed(client))

    async def ask(data: bytes) -> Hop:
        stream = await client._link.open_stream(relay.peer, HOP_PROTOCOL)
        await send_message(stream, data)
        answer = await receive(stream, Hop)
        stream.close()
        return answer

    for message, status in (
        (Hop(kind=Kind.CONNECT, peer={"id": base58.b58decode(relay.peer)}), Status.NO_RESERVATION),
        (Hop(kind=Kind.CONNECT, peer={"id": b"none"}), Status.MALFORMED_MESSAGE),
        (Hop(kind=Kind.STATUS), Status.UNEXPECTED_MESSAGE),
    ):
        assert (await ask(message.SerializeToString())).status == status
    assert (await ask(b"\x08")).status == Status.MALFORMED_MESSAGE
    assert relay.status().reach.relaying.refused == 4


async def test_members_find_out_whether_they_can_be_dialled(members, until) -> None:
    first = await members.start("first", relay=True, relay_bandwidth=RATE)
    second = await members.start("second", join=first.addresses)
    # Says that it listens where it does not, as one behind a NAT does.
    wrong = await members.start("wrong", join=first.addresses, announce=("/ip4/127.0.0.1/tcp/9",))
    for member in (first, second):
        await until(lambda member=member: member.status().reach.state == "direct")
        assert member.transport.dialable
    await until(lambda: relayed(wrong))
    assert "127.0.0.1 port 9" in wrong.status().reach.reason
    assert not wrong.transport.dialable
    # It leaves the others' routing tables: look-ups would fail there.
    await until(lambda: wrong.peer not in first._protocol.peers)
    assert first.reach(wrong.peer).state == "unknown"


async def test_members_find_out_whether_their_direct_port_can_be_opened(members, until, unused_port) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    await until(lambda: second.status().reach.state == "direct")
    assert "direct channel" not in second.status().reach.reason
    # A firewall lets one of its two ports through; what answers at the other is no direct listener.
    for port in (unused_port, parse_address(second.addresses[0]).port):
        second._reach._direct = SimpleNamespace(port=port)
        second._reach._verdict.doubt()
        why = f"; 1 cannot open a direct channel to it: nobody listens at 127.0.0.1 port {port}"
        if port != unused_port:
            why = f"; 1 cannot open a direct channel to it: cannot connect to 127.0.0.1 port {port}"
        await until(lambda why=why: why in second.status().reach.reason)
        assert second.status().reach.state == "direct"


async def test_questions_for_a_dial_back_are_bounded(members, until) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    await until(lambda: second.status().reach.state == "direct")
    asked = [second._reach.ask(first.peer) for _ in range(10)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [str(answer) for answer in answers if isinstance(answer, ConnectionError)]
    assert 5 <= len(refused) < len(answers)
    assert all("too many questions" in one for one in refused)
    assert all(answer.reached for answer in answers if isinstance(answer, Answer))


async def test_a_peer_that_says_nothing_to_a_relay_is_let_go(members, until, monkeypatch) -> None:
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.2)
    relay = await members.start("relay", relay=True, relay_bandwidth=RATE)
    client = await members.start("client", join=relay.addresses, client_mode=True)
    await until(lambda: relayed(client))
    listener = relay._link.listener
    streams = [await client._link.open_stream(relay.peer, HOP_PROTOCOL) for _ in range(40)]
    for stream in streams:
        with pytest.raises(StreamClosed):
            await receive_message(stream)
        stream.close()
    await until(lambda: not listener._tasks)
    assert not listener._open
