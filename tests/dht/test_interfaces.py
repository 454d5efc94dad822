"""Which of this machine's addresses others are told, and in which order."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from equipoise.dht import interfaces, p2pd
from equipoise.dht.address import parse_listen
from equipoise.dht.autonat import Reach
from equipoise.dht.interfaces import Rank, ranks_of_own_addresses, told
from equipoise.dht.options import SwarmOptions
from equipoise.dht.p2pd import ListenError, has_family
from equipoise.dht.swarm import DEFAULT_LISTEN, Swarm

LAN, OTHER, V6 = "192.168.7.2", "10.9.0.4", "2001:db8:7::2"
BRIDGES = [f"172.{17 + at}.0.1" for at in range(12)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a routed address, another network, IPv6, and the bridges of many container networks."""
    found = {f"br-{at:012x}": [host] for at, host in enumerate(BRIDGES)}
    found |= {"eth0": [LAN, V6, "fe80::1%eth0"], "tun0": [OTHER]}
    cards = {
        name: [
            SimpleNamespace(address=one, family=socket.AF_INET6 if ":" in one else socket.AF_INET)
            for one in own
        ]
        for name, own in found.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(
        interfaces, "_source", {interfaces.ELSEWHERE[0]: LAN, interfaces.ELSEWHERE[1]: V6}.get
    )


def hosts(addresses: object) -> list[str]:
    return [address.split("/")[2] for address in addresses]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("machine")
def test_routed_addresses_come_before_others_and_bridges_last() -> None:
    ranks = ranks_of_own_addresses()
    assert ranks[LAN] == ranks[V6] == Rank.ROUTED
    assert ranks[OTHER] == Rank.OTHER
    assert {ranks[host] for host in BRIDGES} == {Rank.VIRTUAL}
    assert ranks["fe80::1"] == Rank.LINK_LOCAL


def test_both_versions_of_ip_are_among_those_told() -> None:
    four = tuple(f"/ip4/10.0.0.{at}/tcp/1" for at in range(5))
    relayed, six = "/ip6/2001:db8::5/tcp/1/p2p/R/p2p-circuit", "/ip6/2001:db8::2/tcp/1"
    assert told(four, 4) == four[:4]
    assert told((*four, relayed, six), 4) == (*four[:3], six)
    assert told((six, *four), 4) == (six, *four[:3])


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("reached", ["", OTHER, BRIDGES[3]])
def test_an_address_by_which_others_have_reached_this_peer_is_told_first(
    tmp_path, monkeypatch: pytest.MonkeyPatch, reached: str
) -> None:
    member = Swarm(tmp_path, SwarmOptions())
    known = sorted([*BRIDGES, LAN, OTHER])
    member._supervisor.addresses = [f"/ip4/{host}/tcp/31337" for host in known] + [f"/ip6/{V6}/tcp/31337"]
    monkeypatch.setattr(Reach, "reached_at", (f"/ip4/{reached}/tcp/31337",) if reached else ())
    member._on_reach()
    best = dict.fromkeys([reached, LAN, V6, OTHER] if reached else [LAN, V6, OTHER, BRIDGES[0]])
    assert hosts(member._protocol.addresses)[: len(best)] == list(best)
    assert len(member._protocol.addresses) == 4


def test_both_versions_of_ip_are_listened_on_by_default_as_far_as_the_machine_has_them(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {one.split("/")[1] for one in DEFAULT_LISTEN} == {"ip4", "ip6"}

    def lacks_ipv6(address: object) -> None:
        if ":" in address.host:  # type: ignore[attr-defined]
            raise ListenError("Address family not supported by protocol")

    monkeypatch.setattr(p2pd, "check_free", lambda address: None)
    assert [one.text for one in Swarm(tmp_path)._supervisor.options.listen] == list(DEFAULT_LISTEN)
    monkeypatch.setattr(p2pd, "check_free", lacks_ipv6)
    assert [one.text for one in Swarm(tmp_path)._supervisor.options.listen] == [DEFAULT_LISTEN[0]]
    assert not has_family(parse_listen("/ip6/::/tcp/31337"))


def test_a_peer_that_has_no_address_does_not_say_that_others_join_through_it(tmp_path) -> None:
    member = Swarm(tmp_path, SwarmOptions(client_mode=True))
    member._on_reach()
    assert "none can, because this peer has no address" in member._bootstrap.machine.why_alone()[1]
