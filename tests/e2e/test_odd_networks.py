"""Machines with the bridges of containers, and slow uplinks, on real networks."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from contracts.run import join_all, together
from e2e.netns import Network, available
from e2e.swarm import DaemonProcess, Swarm, eventually
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


@pytest.mark.parametrize("mbit", [1.0, 5.0, 20.0, 200.0])
def test_an_uplink_is_measured_within_a_fifth_after_five_rounds(swarm: Swarm, mbit: float) -> None:
    """Each round sends for a second or two; both peers have the same uplink, as a slow receiver acknowledges late."""
    values = int(mbit * 1e6 / 8 * (2 if mbit < 100 else 1))
    with Network(hosts=2) as network:
        for host in network.hosts:
            network.shape(host, mbit, down=False)
        first = swarm.daemon(prefix=network.hosts[0].command([]))
        second = swarm.daemon(join=[first.address], prefix=network.hosts[1].command([]))
        clients = [connect(daemon.home) for daemon in (first, second)]
        runs = join_all(clients, [[torch.ones(values)] for _ in clients], "slow", codec="int8")
        assert all(run.wait_for(1) for run in runs)
        for _ in range(ROUNDS):
            assert all(one.ok for one in together(*(partial(run.average, timeout=60.0) for run in runs)))
        found = []
        for daemon in (first, second):
            rows = eventually(lambda daemon=daemon: bandwidths(daemon), "the estimate to be told")
            found += [row * 8 / 1e6 for row in rows]
        for client in clients:
            client.close()
    print(f"{mbit:g} Mbit/s up, estimated: {[round(one, 2) for one in found]}")
    assert found == [pytest.approx(mbit, rel=0.2)] * len(found)


def bandwidths(daemon: DaemonProcess) -> list[float]:
    """What a daemon says that it can send, in bytes per second; empty if it says nothing."""
    return [row["bandwidth"] for row in daemon.json("peers") if row["me"] and row["bandwidth"]]
