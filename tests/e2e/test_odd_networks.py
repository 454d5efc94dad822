"""Machines with the bridges of containers or with IPv6 alone, and slow uplinks, on real networks."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from functools import partial

import pytest
import torch

from contracts.run import join_all, together
from e2e.netns import Network, available
from e2e.swarm import DaemonProcess, Swarm, eventually
from equipoise.averaging.partition import exchange_seconds
from equipoise.compression import parse_codec
from equipoise.peer import connect

TIMES, SECONDS = 20, 10.0
ROUNDS = 5

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(available() != "", reason=available() or "available"),
]


def test_three_hosts_of_a_lan_with_0_6_and_12_bridges_know_each_other(swarm: Swarm) -> None:
    met, took = 0, []
    for _ in range(TIMES):
        with Network(hosts=3, lan="192.168.7") as network:
            for host, count in zip(network.hosts, (0, 6, 12), strict=True):
                network.bridge(host, count)
            first = swarm.daemon(prefix=network.hosts[0].command([]))
            lan = [address for address in first.addresses if network.hosts[0].address in address]
            rest = [swarm.daemon(join=lan, prefix=host.command([])) for host in network.hosts[1:]]
            clients = [connect(daemon.home) for daemon in (first, *rest)]
            began = time.monotonic()
            runs = [client.join("lan", [torch.zeros(8)]) for client in clients]
            met += all(together(*(partial(run.wait_for, 2, timeout=SECONDS) for run in runs)))
            took.append(time.monotonic() - began)
            for client in clients:
                client.close()
            for daemon in (first, *rest):
                daemon.stop()
    print(
        f"all know all in {met} of {TIMES}; seconds: median {sorted(took)[TIMES // 2]:.1f}, most {max(took):.1f}"
    )
    assert met == TIMES


def test_hosts_with_ipv6_alone_meet_and_average(swarm: Swarm) -> None:
    with Network(hosts=2, lan="fd00:7") as network:
        first = swarm.daemon(prefix=network.hosts[0].command([]))
        way = [address for address in first.addresses if f"/ip6/{network.hosts[0].address}/" in address]
        second = swarm.daemon(join=way, prefix=network.hosts[1].command([]))
        clients = [connect(daemon.home) for daemon in (first, second)]
        tensors = [[torch.full((8,), value)] for value in (1.0, 3.0)]
        runs = join_all(clients, tensors, "six")
        assert all(run.wait_for(1, timeout=SECONDS) for run in runs)
        assert all(one.ok for one in together(*(partial(run.average, timeout=SECONDS) for run in runs)))
        channels = [client.status().swarm.direct.listening for client in clients]
        for client in clients:
            client.close()
    assert [one.tolist() for (one,) in tensors] == [[2.0] * 8] * 2
    print(f"joined by {way}; direct channels listen at {channels}")


MIXED = [1.0, 5.0, 20.0, 200.0]
"""Mbit/s up of the members of one group. The link of 1 Mbit/s sends its share for 12 s."""


@pytest.mark.parametrize("links", [[1.0] * 2, [5.0] * 2, [20.0] * 2, [200.0] * 2, MIXED])
def test_uplinks_are_measured_within_a_fifth_after_five_rounds(swarm: Swarm, links: list[float]) -> None:
    """Each round of a pair sends for a second or two. In the group, slow members acknowledge late, and yet count."""
    values = 2_000_000 if len(links) > 2 else int(links[0] * 1e6 / 8 * (2 if links[0] < 100 else 1))
    with Network(hosts=len(links)) as network:
        for host, mbit in zip(network.hosts, links, strict=True):
            network.shape(host, mbit, math.inf)
        # A busy machine is no slow link.
        prefixes = [host.command(["nice", "-n", "-10"]) for host in network.hosts]
        first = swarm.daemon(prefix=prefixes[0])
        others = [swarm.daemon(join=[first.address], prefix=prefix) for prefix in prefixes[1:]]
        clients = [connect(daemon.home) for daemon in (first, *others)]
        runs = join_all(clients, [[torch.ones(values)] for _ in clients], "slow", codec="int8")
        assert all(run.wait_for(len(links) - 1) for run in runs)
        for _ in range(ROUNDS):
            outcomes = together(*(partial(run.average, timeout=120.0) for run in runs))
            assert [len(one.contributors) for one in outcomes] == [len(links)] * len(links), outcomes
        if links is MIXED:
            assert {one.waits["exchange"][0] for one in outcomes[1:]} == {clients[0].peer_id}
        found = []
        for daemon in (first, *others):
            rows = eventually(lambda daemon=daemon: bandwidths(daemon), "the estimate to be told")
            found += [row * 8 / 1e6 for row in rows]
        for client in clients:
            client.close()
    print(f"{links} Mbit/s up, estimated: {[round(one, 2) for one in found]}")
    assert found == [pytest.approx(mbit, rel=0.2) for mbit in links]


def test_a_cap_is_kept_on_the_wire_and_by_the_shares(swarm: Swarm) -> None:
    """One of four peers at 200 Mbit/s sends 1 MB/s at most: over any 5 s, all headers included."""
    values, cap = 2_000_000, 1e6
    with Network(hosts=4) as network:
        for host in network.hosts:
            network.shape(host, 200)
        first = swarm.daemon(prefix=network.hosts[0].command([]))
        args = [[], [], ["--upload", "1MB/s"]]
        others = [
            swarm.daemon(join=[first.address], prefix=host.command([]), args=more)
            for host, more in zip(network.hosts[1:], args, strict=True)
        ]
        clients = [connect(daemon.home) for daemon in (first, *others)]
        runs = join_all(clients, [[torch.ones(values)] for _ in clients], "capped", codec="int8")
        assert all(run.wait_for(3) for run in runs)
        seen, ends = [], threading.Event()

        def look() -> None:
            while not ends.wait(0.1):
                seen.append((time.monotonic(), network.sent(network.hosts[3])))

        looker = threading.Thread(target=look)
        looker.start()
        outcomes = [together(*(partial(run.average, timeout=120.0) for run in runs)) for _ in range(ROUNDS)]
        ends.set()
        looker.join()
        for client in clients:
            client.close()
    assert all(len(one.contributors) == 4 for each in outcomes for one in each), outcomes
    pairs = itertools.combinations(seen, 2)
    fastest = max(
        (sent - before) / (now - since) for (since, before), (now, sent) in pairs if now - since >= 5
    )
    size = parse_codec("int8").encoded_size(values)
    best = size * exchange_seconds([(25e6, 25e6)] * 3 + [(cap, 25e6)], [1 / 3, 1 / 3, 1 / 3, 0.0])
    took = statistics.median(one[0].seconds["exchange"] for one in outcomes)
    print(
        f"{fastest / 1e6:.3f} MB/s at most over 5 s; an exchange took {took:.2f} s, {took / best:.2f}x of the best"
    )
    assert fastest <= 1.05 * cap


def bandwidths(daemon: DaemonProcess) -> list[float]:
    """What a daemon says that it can send, in bytes per second; empty if it says nothing."""
    return [row["bandwidth"] for row in daemon.json("peers") if row["me"] and row["bandwidth"]]
