"""What `status` and `peers` show is so: of peers that left, died or were cut off, and of addresses that changed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from e2e.netns import Host, Network, available
from e2e.swarm import Swarm, eventually
from equipoise.peer import connect
from equipoise.peer.connecting import Client

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(available() != "", reason=available() or "available"),
]

LEFT_SECONDS, KILLED_SECONDS, CUT_SECONDS, MOVED_SECONDS = 5.0, 30.0, 10.0, 15.0


class Party:
    """Three daemons on hosts of their own, all in one run."""

    def __init__(self, swarm: Swarm, network: Network) -> None:
        self.network = network
        self.hosts = network.hosts
        first = swarm.daemon(prefix=self.hosts[0].command([]))
        joined = [swarm.daemon(join=[first.address], prefix=host.command([])) for host in self.hosts[1:]]
        self.daemons = [first, *joined]
        self.clients = [connect(daemon.home) for daemon in self.daemons]
        self.ids = [client.status().peer_id for client in self.clients]
        self.runs = [client.join("digits", [torch.zeros(4)], codec="fp32") for client in self.clients]
        self.until_all_see_all()

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def until_all_see_all(self, seconds: float = 30.0) -> None:
        for client in self.clients:
            eventually(lambda client=client: shown(client) == set(self.ids), "all to see all", seconds)

    def seconds_until_gone(self, began: float) -> float:
        """Until neither of the others shows the last one, in seconds from `began`."""
        rest = set(self.ids[:2])
        for client in self.clients[:2]:
            eventually(lambda client=client: shown(client) == rest, "the last one to be gone", 60.0)
        return time.monotonic() - began


@pytest.fixture
def party(swarm: Swarm) -> Iterator[Party]:
    with Network(hosts=3) as network:
        party = Party(swarm, network)
        yield party
        party.close()


def shown(client: Client) -> set[str]:
    """Whom `status` and `peers` of a daemon show, itself included; empty while they do not say the same."""
    status = client.status()
    others = status.swarm.connected
    said = f"{len(others)} other peer" in status.swarm.reason if others else status.swarm.state == "searching"
    listed = {row.peer for row in client.peers()}
    return listed if said and listed == {status.peer_id, *others} else set()


def within(what: str, seconds: float, limit: float) -> None:
    print(f"{what}: true after {seconds:.1f} s of {limit:g}")
    assert seconds <= limit


def test_a_peer_that_leaves_is_gone_from_the_list(party: Party) -> None:
    began = time.monotonic()
    party.clients[2].close()
    party.daemons[2].stop()
    within("graceful leave", party.seconds_until_gone(began), LEFT_SECONDS)


def test_a_killed_peer_is_gone_from_the_list(party: Party) -> None:
    began = time.monotonic()
    party.daemons[2].kill()
    within("SIGKILL", party.seconds_until_gone(began), KILLED_SECONDS)


def test_a_peer_whose_cable_is_pulled_comes_back(party: Party) -> None:
    began = time.monotonic()
    party.network.cut(party.hosts[2])
    eventually(lambda: party.clients[2].status().swarm.state == "searching", "it to notice")
    within("cable pulled, itself", time.monotonic() - began, CUT_SECONDS)
    within("cable pulled, the others", party.seconds_until_gone(began), CUT_SECONDS)
    party.network.heal(party.hosts[2])
    party.until_all_see_all(65.0)


def test_a_peer_whose_address_changes_is_found_there(party: Party) -> None:
    host, began = party.hosts[2], time.monotonic()
    before, after = host.address, f"{host.address}7"
    move(host, before, after)
    eventually(lambda: addresses(party.clients[2]) == {after}, "its own new address")
    within("address changed, itself", time.monotonic() - began, MOVED_SECONDS)
    party.until_all_see_all()
    for client in party.clients[:2]:
        eventually(lambda client=client: reached(client, party.ids[2]), "it to be reached")
    within("address changed, the others", time.monotonic() - began, MOVED_SECONDS)


def move(host: Host, before: str, after: str) -> None:
    for words in (["delete", f"{before}/24"], ["add", f"{after}/24"]):
        run(host, ["ip", "address", words[0], words[1], "dev", "eth0"])


def run(host: Host, words: Sequence[str]) -> None:
    subprocess.run(host.command(words), check=True, timeout=30, capture_output=True)


def addresses(client: Client) -> set[str]:
    return {address.split("/")[2] for address in client.status().swarm.addresses}


def reached(client: Client, peer: str) -> bool:
    return next(row for row in client.peers() if row.peer == peer).reach == "direct"
