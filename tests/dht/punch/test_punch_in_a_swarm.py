"""Real members that nobody can dial, a relay that sees where they come from, and holes between them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from equipoise.dht.punch import puncher
from equipoise.dht.punch.candidates import PUNCH_PROTOCOL, End, decode
from equipoise.dht.punch.puncher import SharedPort
from equipoise.dht.streams import receive_message
from equipoise.dht.swarm import Swarm
from equipoise.limits import Stand

RUN = "digits"


class Trio:
    """A relay, and two that are relayed: they say that they listen where they do not, as those behind NATs do."""

    def __init__(self, relay: Swarm, first: Swarm, second: Swarm) -> None:
        self.relay = relay
        self.first = first
        self.second = second

    async def meet(self, until) -> None:
        """Be in one round."""
        for member in (self.first, self.second):
            await member.directory.announce(RUN, Stand(spec="ab", state="ready"))
        for member in (self.first, self.second):
            await until(lambda member=member: knows_another(member))
        # Both in one step: the first would begin a punch that the second refuses until it has met the first.
        for one, other in ((self.first, self.second), (self.second, self.first)):
            one.direct.admit(other.peer, other.direct.credential)
            one.direct.meet(other.peer)


async def knows_another(member: Swarm) -> bool:
    return len(await member.directory.peers(RUN)) == 2


@pytest.fixture
async def trio(members, until, monkeypatch) -> Trio:
    monkeypatch.setattr(puncher, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(puncher, "PATIENCE_SECONDS", 0.0)
    relay = await members.start("relay", relay=True)
    elsewhere = {"join": relay.addresses, "announce": ("/ip4/127.0.0.1/tcp/9",)}
    hidden = await asyncio.gather(*(members.start(name, **elsewhere) for name in ("a", "b")))
    for member in hidden:
        await until(lambda member=member: member.status().reach.state == "relayed")
        assert list(member._reach.mirrors) == [("127.0.0.1", relay.direct.port)]
    first, second = sorted(hidden, key=lambda member: member.peer)
    return Trio(relay, first, second)


async def test_members_of_a_round_get_a_hole(trio: Trio, until, monkeypatch) -> None:
    monkeypatch.setattr(puncher, "FIRST_RETRY_SECONDS", 0.1)
    accepted: asyncio.Queue = asyncio.Queue()

    async def serve(channel) -> None:
        await accepted.put(channel)
        await asyncio.Event().wait()

    for member in (trio.first, trio.second):
        member.direct.serve(serve)
    await trio.meet(until)
    for one, other in ((trio.first, trio.second), (trio.second, trio.first)):
        await until(
            lambda one=one, other=other: any(made.punched for made in one.direct.channels.having(other.peer))
        )
        reached = one.reach(other.peer)
        assert reached.state == "direct"
        assert reached.reason.startswith("hole punched")
    channels = {channel.peer: channel for channel in [await accepted.get() for _ in range(2)]}
    assert channels.keys() == {trio.first.peer, trio.second.peer}
    # Closed when idle, it is there again for a round that comes minutes later.
    channels[trio.second.peer].close()
    assert not trio.first.direct.channels.having(trio.second.peer)
    await until(lambda: any(made.punched for made in trio.first.direct.channels.having(trio.second.peer)))


async def test_a_hole_that_cannot_be_punched_is_told_of_and_the_relay_stays(
    trio: Trio, until, monkeypatch
) -> None:
    async def swallow(self: SharedPort, place: tuple[str, int]) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(SharedPort, "connect", swallow)
    monkeypatch.setattr(puncher, "TRY_SECONDS", 0.05)
    await trio.meet(until)
    for one, other in ((trio.first, trio.second), (trio.second, trio.first)):
        await until(lambda one=one, other=other: "punching failed" in one.reach(other.peer).reason)
        reached = one.reach(other.peer)
        assert reached.state == "relayed"
        assert "nobody answered at 127.0.0.1" in reached.reason
        assert not one.direct.channels.having(other.peer)
    assert (await trio.first.transport.open(trio.second.peer)).peer == trio.second.peer


@pytest.fixture
def eager(monkeypatch) -> None:
    """Punches begin anew at once, and as often as there are tries left."""
    monkeypatch.setattr(puncher, "TRY_SECONDS", 0.01)
    monkeypatch.setattr(puncher, "FIRST_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(puncher, "CALLS_PER_SECOND", 1e9)
    monkeypatch.setattr(puncher, "TRIES_BURST", 12.0)


@pytest.mark.usefixtures("eager")
async def test_no_address_is_tried_without_end_whoever_names_it(trio: Trio, until, monkeypatch) -> None:
    tried: list[tuple[str, int]] = []

    async def refuse(self: SharedPort, place: tuple[str, int]) -> None:
        tried.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(SharedPort, "connect", refuse)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await trio.meet(until)
    for one, other in ((trio.first, trio.second), (trio.second, trio.first)):
        await until(lambda one=one, other=other: "tried too often" in one.reach(other.peer).reason)
    for _, host_tries in Counter(host for host, _ in tried).items():
        allowed = puncher.TRIES_BURST + puncher.TRIES_PER_SECOND * (loop.time() - began)
        assert host_tries <= 2 * allowed, "of both sides"


async def test_a_peer_admitted_for_a_transfer_alone_gets_no_hole(trio: Trio, until) -> None:
    for one, other in ((trio.first, trio.second), (trio.second, trio.first)):
        one.direct.admit(other.peer, other.direct.credential)
        assert "in no round" in one._puncher.schedule.refusal(other.peer, asyncio.get_running_loop().time())
        one.direct.meet(other.peer)
        assert not one._puncher.schedule.refusal(other.peer, asyncio.get_running_loop().time())


async def test_a_peer_without_a_part_in_the_punch_says_so(trio: Trio) -> None:
    for one, other, why in (
        (trio.first, trio.relay, "not behind a NAT"),
        (trio.first, trio.second, "in no round"),
        (trio.second, trio.first, "has to start this punch"),
    ):
        one._protocol.dialer.learn(other.peer, other.addresses)
        await one._protocol.dialer.reach(other.peer)
        reasons = []
        for _ in range(5):
            stream = await one._link.open_stream(other.peer, PUNCH_PROTOCOL)
            said = decode(await receive_message(stream))
            stream.close()
            assert isinstance(said, End)
            reasons.append(said.reason)
        assert all(why in reason for reason in reasons[:3])
        assert "too often" in reasons[-1]
