"""Direct channels of real members: credentials travel in records, and channels need no p2pd."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from equipoise.dht.address import parse_address
from equipoise.limits import Stand

RUN = "digits"


async def announce(*members) -> None:
    for member in members:
        await member.directory.announce(RUN, Stand(spec="ab", state="ready"))


async def admit_from_records(until, *members) -> None:
    for member in members:
        await until(lambda member=member: _sees(member, len(members)))
        for record in await member.directory.peers(RUN):
            if record.peer != member.peer:
                member.direct.admit(record.peer, record.credential)


async def _sees(member, count: int) -> bool:
    return len(await member.directory.peers(RUN)) == count


async def test_channels_work_while_p2pd_is_dead(members, until) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    await announce(first, second)
    await admit_from_records(until, first, second)
    accepted: asyncio.Queue = asyncio.Queue()

    async def serve(channel) -> None:
        await accepted.put(channel)
        await asyncio.Event().wait()

    second.direct.serve(serve)
    before = await first.direct.open(second.peer)
    for member in (first, second):
        os.kill(member.status().p2pd_pid, signal.SIGKILL)
    await before.send(b"sent on a channel from before")
    after = await first.direct.open(second.peer)
    await after.send(b"sent on a channel from after")
    for said in (b"before", b"after"):
        header, _ = await (await accepted.get()).receive(lambda _, size: memoryview(bytearray(size)))
        assert header.endswith(said)
    status = first.status().direct
    assert (status.channel, status.channels, status.refused) == ("aead", 2, {})
    assert [address.split(":")[0] for address in status.listening] == ["127.0.0.1"]


async def test_a_peer_in_client_mode_tells_no_address_and_dials(members, until) -> None:
    public = await members.start("public", channel="tls")
    hidden = await members.start("hidden", join=public.addresses, client_mode=True)
    await announce(public, hidden)
    await admit_from_records(until, public, hidden)
    assert hidden.direct.reaches(public.peer)
    assert not public.direct.reaches(hidden.peer)
    assert hidden.status().direct.listening == ()
    public.direct.serve(_ignore)
    assert (await hidden.direct.open(public.peer)).peer == public.peer


async def test_the_port_of_direct_channels_can_be_chosen(members, unused_port) -> None:
    member = await members.start("member", direct_listen=[f"/ip4/127.0.0.1/tcp/{unused_port}"])
    assert member.status().direct.listening == (f"127.0.0.1:{unused_port}",)
    assert parse_address(member.addresses[0]).port != unused_port
    with pytest.raises(Exception, match="--direct-listen"):
        await members.start("other", direct_listen=[f"/ip4/127.0.0.1/tcp/{unused_port}"])


async def _ignore(channel) -> None:
    await asyncio.Event().wait()
