"""Machines with the bridges of containers, and slow uplinks, on real networks."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from contracts.run import join_all, together
from e2e.netns import Network, available
from e2e.swarm import Swarm
from equipoise.peer import connect

TIMES, SECONDS = 20, 10.0
UPLINKS = (1.0, 5.0, 20.0, 200.0)
ROUNDS, VALUES = 5, 4_000_000

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
            lan = [one for one in first.addresses if network.hosts[0].address in one]
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


@pytest.mark.xfail(
    reason="bursts of 30 ms are sampled each 50 ms, and bytes in flight at their end are not counted: "
    "a link of 200 Mbit/s counted as 58 after two rounds"
)
def test_uplinks_are_measured_within_a_fifth_after_five_rounds(swarm: Swarm) -> None:
    with Network(hosts=len(UPLINKS)) as network:
        for host, mbit in zip(network.hosts, UPLINKS, strict=True):
            network.shape(host, mbit, down=False)
        first = swarm.daemon(prefix=network.hosts[0].command([]))
        rest = [swarm.daemon(join=[first.address], prefix=host.command([])) for host in network.hosts[1:]]
        daemons = [first, *rest]
        clients = [connect(daemon.home) for daemon in daemons]
        runs = join_all(clients, [[torch.ones(VALUES)] for _ in clients], "slow", codec="int8")
        assert all(run.wait_for(len(runs) - 1) for run in runs)
        for number in range(ROUNDS):
            outcomes = together(*(partial(run.average, timeout=300.0) for run in runs))
            print(
                f"round {number}: {[(one.ok, round(one.seconds.get('total', 0.0), 1)) for one in outcomes]}"
            )
        told = {row["peer"]: row["bandwidth"] * 8 / 1e6 for row in daemons[0].json("peers")}
        found = [told[client.peer_id] for client in clients]
        for client in clients:
            client.close()
    print(f"Mbit/s up: {UPLINKS}, estimated: {[round(one, 2) for one in found]}")
    for mbit, estimate in zip(UPLINKS, found, strict=True):
        assert estimate == pytest.approx(mbit, rel=0.2)
