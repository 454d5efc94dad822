"""Two daemons with one identity are told so; a daemon that was started again is not told."""

from __future__ import annotations

import shutil
from pathlib import Path

from equipoise.dht.options import SwarmOptions
from equipoise.dht.protocol import DOUBLED_SECONDS, MAX_PEERS, Instances
from equipoise.dht.swarm import Swarm
from equipoise.limits import Stand


def test_restarts_are_no_twins() -> None:
    instances = Instances()
    for second, instance in enumerate((b"a", b"a", b"b", b"b", b"c", b"")):
        instances.hear("peer", instance, float(second))
        assert not instances.doubled("peer", float(second))


def test_an_instance_that_comes_back_after_another_is_a_twin_for_a_while() -> None:
    instances = Instances()
    for second, instance in enumerate((b"a", b"b", b"c", b"c", b"b")):
        assert not instances.doubled("peer", float(second))
        instances.hear("peer", instance, float(second))
    assert instances.doubled("peer", 4.0)
    assert not instances.doubled("other", 4.0)
    for second in range(5, 40):
        instances.hear("peer", b"b", float(second))
    assert not instances.doubled("peer", 4.0 + DOUBLED_SECONDS)


def test_strangers_take_little_memory() -> None:
    instances = Instances()
    for number in range(2 * MAX_PEERS):
        for instance in (b"a", b"b", b"a"):
            instances.hear(str(number), instance, 0.0)
    assert len(instances._heard) == MAX_PEERS


async def test_a_copied_home_is_warned_of(members, until, monkeypatch) -> None:
    monkeypatch.setattr("equipoise.dht.swarm.HOUSEKEEPING_SECONDS", 0.2)
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    home = members.home("copy")
    home.mkdir(mode=0o700)
    shutil.copy(members.home("second") / "identity.key", home)
    copy = await members.start("copy", join=first.addresses)
    assert copy.peer == second.peer
    for member in (second, copy):
        await until(lambda member=member: any("one's identity" in text for text in member.status().warnings))
    assert first.status().warnings == ()


def test_an_address_with_the_own_identity_that_is_not_its_own_is_warned_of(tmp_path: Path) -> None:
    peer = Swarm(tmp_path, SwarmOptions()).peer
    own, far = (f"/ip4/{host}/tcp/31337/p2p/{peer}" for host in ("192.168.1.7", "192.168.1.8"))
    for joined, warned in ((own, False), (far, True), (own.replace("192.168.1.7", "127.0.0.1"), False)):
        member = Swarm(tmp_path, SwarmOptions(join=[joined]))
        assert not member._twins(), "its addresses are not known yet"
        member._supervisor.addresses = ["/ip4/192.168.1.7/tcp/31337"]
        assert bool(member._twins()) is warned


async def test_a_name_travels_in_its_record(members, until) -> None:
    first = await members.start("first", name="the first")
    second = await members.start("second", join=first.addresses, name="gpu \u202e box")
    await second.directory.announce("digits", Stand(spec="ab", state="ready", round=1))
    await first.directory.announce("digits", Stand(spec="ab", state="ready", round=1))
    told = {first.peer: "the first", second.peer: "gpu \u202e box"}
    for member in (first, second):

        async def hears(member: Swarm = member) -> bool:
            return {one.peer: one.name for one in await member.directory.peers("digits")} == told

        await until(hears)
