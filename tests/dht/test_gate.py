"""Strangers call each way into a member of a private swarm, and the gate refuses them; real p2pds on loopback."""

from __future__ import annotations

import ast
import asyncio
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

import equipoise.dht
from equipoise.dht import autonat, messages, protocol
from equipoise.dht.admission import Admission, Invitation, Link, Revocations, public_half
from equipoise.dht.autonat import DIALBACK
from equipoise.dht.direct import transport as direct
from equipoise.dht.direct.handshake import Preface
from equipoise.dht.direct.listener import ORIGIN_QUESTION
from equipoise.dht.gate import PRESENT, REVOKE
from equipoise.dht.identity import public_key_of
from equipoise.dht.membership import Membership, bans
from equipoise.dht.p2pd_client import P2pdClientError
from equipoise.dht.protocol import CALL, CallError
from equipoise.dht.punch import candidates
from equipoise.dht.punch.candidates import PUNCH_PROTOCOL
from equipoise.dht.relay import service
from equipoise.dht.relay.service import HOP_PROTOCOL
from equipoise.dht.streams import StreamClosed
from equipoise.dht.swarm import Swarm
from equipoise.dht.transport import STREAM_PROTOCOL
from equipoise.limits import Stand

CALLS = (CALL, DIALBACK, REVOKE)
STREAMS = (STREAM_PROTOCOL, HOP_PROTOCOL, PUNCH_PROTOCOL)
WAYS = {PRESENT, *CALLS, *STREAMS}
"""Every way into a daemon through p2pd; p2pd's own, in Go, tell a stranger addresses of this machine and names derived
from the swarm."""

DOORS = {
    "StreamListener": {"p2pd_client.py"},
    "Acceptor": {"p2pd_client.py", "listener.py", "puncher.py"},
}
"""What opens a way in, and the modules that call it: those of `WAYS`, the port of direct channels, and the punch port,
whose connections pass `DirectTransport.punch`."""

OTHER, FIRST = bytes([7]) * 32, bytes([8]) * 32
CASES = ("no token", "expired", "other swarm", "revoked", "another peer's", "chain too long", "malformed")


def founded(home: Path) -> Membership:
    return Membership.create(home, "friends")


def invited(founder: Membership, home: Path, **changes) -> Membership:
    """A membership of another home, by a line of the founder."""
    link = Link(bytes(32), changes.get("role", "trainer"), int(time.time()) + 3600)
    return Membership.redeem(home, founder.invite(link, FIRST, ()).line, time.time())


@pytest.fixture
async def owner(members) -> Swarm:
    return await members.start("owner", membership=founded(members.home("owner")), relay=True)


@pytest.fixture
async def stranger(members, owner) -> Swarm:
    """A daemon of a peer that knows the swarm's public key, and so all its names, and has no token."""
    stranger = await members.start("stranger")
    stranger.gate.swarm = owner.gate.swarm
    stranger.gate.present = _pass
    stranger._protocol.dialer.learn(owner.peer, owner.addresses)
    await stranger._protocol.dialer.reach(owner.peer)
    return stranger


def token_of(case: str, peer: str, owner) -> bytes:
    """What the stranger presents."""
    root = Invitation("friends", owner.gate.swarm, (), owner.membership.key)
    late = Link(bytes(32), "trainer", 1_000_000)
    good = replace(late, end=int(time.time()) + 3600)
    if case == "expired":
        return root.invite(FIRST, late).token(peer, 0.0).encode()
    if case == "other swarm":
        return Invitation("x", public_half(OTHER), (), OTHER).invite(FIRST, good).token(peer, 0.0).encode()
    token = root.invite(FIRST, good).token(owner.peer if case == "another peer's" else peer, 0.0)
    if case == "revoked":
        owner.gate.admission.revocations = Revocations().add(owner.membership.key, [token.ids[-1]])
    if case == "chain too long":
        return replace(token, links=token.links * 3).encode()
    return bytes(10) if case == "malformed" else token.encode()


@pytest.fixture
def parsed(monkeypatch) -> list[str]:
    """The names of the parsers that were given bytes of a caller."""
    seen: list[str] = []

    def watch(module, name: str) -> None:
        before = getattr(module, name)

        def parse(*arguments, **named):
            seen.append(name)
            return before(*arguments, **named)

        monkeypatch.setattr(module, name, parse)

    for module, name in (
        (protocol, "decode"),
        (autonat, "decode"),
        (service, "receive"),
        (candidates, "decode"),
        (direct, "parse_preface"),
        (direct, "origin_answer"),
    ):
        watch(module, name)
    monkeypatch.setattr(Revocations, "decode", lambda *_: seen.append("revocations"))
    return seen


@pytest.mark.parametrize("case", CASES)
async def test_no_way_in_is_open_to_a_peer_without_a_good_token(
    owner, stranger: Swarm, parsed: list[str], case: str
) -> None:
    link = stranger._link
    if case != "no token":
        token = token_of(case, stranger.peer, owner)
        answer = await link._call(owner.peer, PRESENT, token, 3.0)
        assert answer.startswith(b"refused: ")
        assert owner.gate.admission.token.encode() not in answer
        assert len(answer) < 200
    for name in CALLS:
        with pytest.raises(P2pdClientError, match="presented no token"):
            await link._call(owner.peer, name, messages.encode(messages.Versioned()), 3.0)
    for name in STREAMS:
        stream = await link.open_stream(owner.peer, name)
        with pytest.raises(StreamClosed):
            await stream.receive_into(memoryview(bytearray(1)))
        stream.close()
    preface = Preface("aead", stranger.peer, owner.peer).encode()
    for opening in (
        preface,
        ORIGIN_QUESTION,
        owner.gate.lock("nobody", preface),
        owner.gate.lock("x", ORIGIN_QUESTION),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", owner.direct.port)
        writer.write(opening)
        assert await reader.read() == b""
        writer.close()
    assert parsed == []
    assert stranger.peer not in owner.status().members
    assert owner.gate.admission.members(time.time()) == []


async def test_all_ways_in_are_registered_through_the_gate(owner) -> None:
    link = owner._link
    assert {*link.listener.ways, *link._calls} == set(map(owner.gate.scoped, WAYS))


def test_nothing_else_opens_a_way_in() -> None:
    found: dict[str, set[str]] = {name: set() for name in DOORS}
    for path in Path(next(iter(equipoise.dht.__path__))).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in found:
                    found[name].add(path.name)
    assert found == DOORS


async def test_members_meet_by_an_invitation_and_an_open_daemon_does_not(members, owner, until) -> None:
    home = members.home("guest")
    guest = await members.start("guest", owner.addresses, invited(owner.membership, home))
    outsider = await members.start("outsider", owner.addresses)
    for member in (owner, guest):
        await member.directory.announce("digits", Stand(spec="ab", state="ready", round=1))
    for member in (owner, guest):

        async def both(member: Swarm = member) -> bool:
            return len(await member.directory.peers("digits")) == 2

        await until(both)
    assert guest.status().members == (owner.peer,)
    assert owner.status().members == (guest.peer,)
    owner.direct.admit(guest.peer, guest.direct.credential)
    guest.direct.admit(owner.peer, owner.direct.credential)
    owner.direct.serve(_hold)
    channel = await guest.direct.open(owner.peer)
    assert owner.direct.channels.having(guest.peer)
    channel.close()
    await until(lambda: outsider.status().bootstrap[0].attempts)
    assert await outsider.directory.peers("digits") == []
    assert outsider.status().connected == ()


def membership_of(member: Swarm) -> Membership:
    assert member.membership is not None
    return member.membership


async def _pass(peer: str) -> None:
    pass


async def _hold(channel) -> None:
    await asyncio.Event().wait()


async def test_a_revoked_member_is_out_at_all_and_stays_out(members, owner, until) -> None:
    guests = [
        await members.start(name, owner.addresses, invited_once(owner.membership, members.home(name), number))
        for number, name in enumerate(("a", "b"))
    ]
    bad, good = guests
    everyone = {owner.peer, bad.peer, good.peer}
    for member in (owner, *guests):
        member.gate.tasks.spawn(member._protocol.look_up([bytes(20)]))
        await until(lambda member=member: {*member.status().members, member.peer} == everyone)
    good.direct.serve(_hold)
    for one, other in ((bad, good), (good, bad)):
        one.direct.admit(other.peer, other.direct.credential)
    channel = await bad.direct.open(good.peer)
    assert owner.revoke(bad.peer) == [
        public_key_of(bad.peer)[:16].hex(),
        membership_of(bad).invitation.links[-1].id,
    ]
    for member in (owner, good):
        await until(lambda member=member: bad.peer not in member.status().members)
        await until(lambda member=member: bad.peer not in member.status().connected)
    await until(lambda: not good.direct.channels.having(bad.peer))
    with pytest.raises(ConnectionError):
        await channel.receive(lambda header, size: memoryview(bytearray(size)))
    assert Membership.load(members.home("b"), "friends", time.time()).revocations.number == 1
    line = membership_of(bad).invitation.line
    membership = Membership.redeem(members.home("again"), line, time.time())
    again = await members.start("again", owner.addresses, membership)
    await until(lambda: again.status().bootstrap[0].state == "not admitted")
    assert "revoked" in again.status().bootstrap[0].reason


def invited_once(founder: Membership, home: Path, number: int) -> Membership:
    link = Link(bytes(32), "trainer", int(time.time()) + 3600)
    return Membership.redeem(home, founder.invite(link, bytes([20 + number]) * 32, ()).line, time.time())


async def test_a_member_that_was_started_again_is_met_again(members, owner, until) -> None:
    home = members.home("guest")
    membership = invited(owner.membership, home)
    guest = await members.start("guest", owner.addresses, membership)
    await until(lambda: owner.status().members == (guest.peer,))
    # As if it had been started again: it has forgotten everybody.
    owner.gate.admission = Admission(owner.gate.admission.token)
    await guest._protocol.ping(owner.peer)
    assert owner.status().members == (guest.peer,)


@pytest.mark.parametrize("private", [False, True], ids=["open", "private"])
async def test_a_banned_peer_is_out_here_alone_until_it_is_allowed(members, until, private: bool) -> None:
    founder = founded(members.home("one")) if private else None
    guest = invited(founder, members.home("two")) if founder else None
    one = await members.start("one", membership=founder)
    two = await members.start("two", one.addresses, guest)

    async def meets() -> bool:
        return [len(await member.directory.peers("digits")) for member in (one, two)] == [2, 2]

    for member in (one, two):
        await member.directory.announce("digits", Stand(spec="ab", state="ready", round=1))
    await until(meets)
    for member, other in ((one, two), (two, one)):
        member.direct.admit(other.peer, other.direct.credential)
        member.direct.serve(_hold)
    channel = await two.direct.open(one.peer)
    one.ban(two.peer, "noise")
    await until(lambda: not one.direct.channels.having(two.peer) and two.peer not in one.status().connected)
    with pytest.raises(ConnectionError):
        await channel.receive(lambda header, size: memoryview(bytearray(size)))
    for way in (two._protocol.ping(one.peer), two.direct.open(one.peer)):
        with pytest.raises((ConnectionError, CallError)):
            await way
    for way in (one._protocol.ping(two.peer), one.direct.open(two.peer), one.transport.open(two.peer)):
        with pytest.raises((ConnectionError, CallError), match="has banned"):
            await way
    assert [found.peer for found in await one.directory.peers("digits")] == [one.peer]
    assert [found.peer for found in one.directory.banned("digits")] == [two.peer]
    assert (one.gate.admission.role(two.peer), one.gate.standing(two.peer)) == ("trainer", "banned")
    assert one.reach(two.peer).reason == "banned here: noise"
    assert bans(members.home("one")) == {two.peer: "noise"}
    one.ban(two.peer, None)
    await one._protocol.ping(two.peer)
    await until(meets)
