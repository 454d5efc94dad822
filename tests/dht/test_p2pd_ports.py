"""A daemon listens where it listened before, and no two daemons take one port."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path

import pytest

from equipoise.dht import dialpolicy
from equipoise.dht.address import AddressError, parse_announce, parse_listen
from equipoise.dht.options import SwarmOptions
from equipoise.dht.p2pd import ListenError, claim
from equipoise.dht.peer_cache import PeerCache
from equipoise.dht.swarm import Swarm

ANY = (parse_listen("/ip4/127.0.0.1/tcp/0"),)


def test_a_wished_port_is_taken_and_the_next_daemon_draws_another(unused_port: int) -> None:
    with contextlib.ExitStack() as locks:
        [first] = claim(ANY, unused_port, locks)
        [second] = claim(ANY, unused_port, locks)
        assert first.text == f"/ip4/127.0.0.1/tcp/{unused_port}"
        assert first.port == unused_port
        assert second.port not in (0, unused_port)
    with contextlib.ExitStack() as locks:
        [third] = claim(ANY, unused_port, locks)
    assert third.port == unused_port


def test_both_versions_of_ip_get_one_port(unused_port: int) -> None:
    both = [parse_listen("/ip4/0.0.0.0/tcp/0"), parse_listen("/ip6/::/tcp/0")]
    for wish in (unused_port, 0):
        with contextlib.ExitStack() as locks:
            first, second = claim(both, wish, locks)
            assert first.port == second.port != 0


def test_drawn_ports_are_none_that_the_system_gives_to_connections() -> None:
    with contextlib.ExitStack() as locks:
        drawn = {claim(ANY, 0, locks)[0].port for _ in range(32)}
    assert len(drawn) == 32
    assert all(1024 < port < 32768 for port in drawn)


def test_a_port_that_is_named_is_taken_or_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        named = parse_listen(f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}")
        with pytest.raises(ListenError, match="Address already in use"):
            claim([named], 0, contextlib.ExitStack())
    with contextlib.ExitStack() as locks:
        assert claim([named], 0, locks) == (named,)
        with pytest.raises(ListenError, match="another daemon is taking the same port"):
            claim([*ANY, named], 0, locks)


def test_ports_survive_in_the_home(tmp_path: Path) -> None:
    memory = PeerCache(tmp_path)
    assert memory.ports == (0, 0)
    memory.ports = 31337, 31338
    memory.save()
    assert PeerCache(tmp_path).ports == (31337, 31338)
    (tmp_path / "swarm.json").write_text('{"port": 70000}')
    assert PeerCache(tmp_path).ports == (0, 0)


async def test_a_member_listens_where_it_did_before(members) -> None:
    first = await members.start("first")
    addresses, direct = first.addresses, first.direct.port
    await first.stop()
    again = await members.start("first")
    assert (again.addresses, again.direct.port) == (addresses, direct)
    assert again.status().warnings == ()


async def test_a_port_that_another_program_took_is_replaced_said_and_kept(members) -> None:
    first = await members.start("first")
    port = int(first.addresses[0].split("/")[4])
    await first.stop()
    with socket.create_server(("127.0.0.1", port)):
        moved = await members.start("first")
        [warning] = moved.status().warnings
        now = int(moved.addresses[0].split("/")[4])
        assert (
            warning
            == f"port {port} is used by another program; this daemon listens on port {now} from now on"
        )
        await moved.stop()
    again = await members.start("first")
    assert int(again.addresses[0].split("/")[4]) == now
    assert again.status().warnings == ()


def test_loopback_is_told_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    member = Swarm(tmp_path, SwarmOptions())
    member._supervisor.addresses = ["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.7/tcp/1"]
    assert member.addresses == [f"/ip4/192.168.1.7/tcp/1/p2p/{member.peer}"]
    member._supervisor.addresses = ["/ip4/127.0.0.1/tcp/1"]
    assert member.addresses == [f"/ip4/127.0.0.1/tcp/1/p2p/{member.peer}"]


async def test_others_are_told_what_is_announced(members, until) -> None:
    first = await members.start("first")
    named = "/dns4/gpu.example.org/tcp/31337"
    second = await members.start("second", join=first.addresses, announce=[named])
    assert second.addresses == [f"{named}/p2p/{second.peer}"]
    # Before the other has tried to dial it there, in vain.
    assert second.direct.status().listening[0] == f"gpu.example.org:{second.direct.port}"
    await until(lambda: first._protocol.dialer.addresses_of(second.peer) == (f"{named}/p2p/{second.peer}",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpu.example.org:31337", "expected it to start with /"),
        ("/dns4/gpu.example.org/tcp/0", "port 0 cannot be dialled"),
        ("/dns4/gpu.example.org/udp/31337", "expected /tcp after the host"),
        ("/dns4/gpu.example.org/tcp/31337/p2p/x", "expected nothing after the port"),
    ],
)
def test_an_address_that_cannot_be_announced_is_one_clear_line(text: str, problem: str) -> None:
    with pytest.raises(AddressError, match=f"{problem}.*for example /dns4/"):
        parse_announce(text)


@pytest.mark.parametrize(
    ("own", "listen", "asked"),
    [
        (["127.0.0.1", "192.168.1.7"], "0.0.0.0", True),
        (["127.0.0.1"], "0.0.0.0", False),
        (["192.168.1.7"], "127.0.0.1", False),
        (["192.168.1.7", "8.8.8.8"], "0.0.0.0", False),
        (["169.254.3.4"], "0.0.0.0", False),
        (["100.64.3.4"], "0.0.0.0", True),
        (["8.8.8.8"], "10.0.0.7", True),
        (["192.168.1.7"], "::", False),
    ],
)
def test_the_router_is_asked_where_addresses_are_private(monkeypatch, own, listen: str, asked: bool) -> None:
    monkeypatch.setattr(dialpolicy, "own_addresses", lambda: [ipaddress.IPv4Address(one) for one in own])
    assert dialpolicy.behind_router([listen]) is asked


@pytest.mark.parametrize(
    ("upnp", "private", "mapped"), [(None, True, 1), (None, False, 0), (True, False, 1), (False, True, 0)]
)
def test_p2pd_is_told_whether_to_ask_the_router(
    tmp_path: Path, monkeypatch, upnp, private: bool, mapped: int
) -> None:
    own = ipaddress.IPv4Address("192.168.1.7" if private else "8.8.8.8")
    monkeypatch.setattr(dialpolicy, "own_addresses", lambda: [own])
    member = Swarm(tmp_path, SwarmOptions(upnp=upnp, listen=["/ip4/0.0.0.0/tcp/31337"]))
    assert f"-natPortMap={mapped}" in member._supervisor.options.arguments()
