"""Peers behind NATs, on real networks: they are reached, and average exactly or say why not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.fleet import Fleet, normal
from e2e.netns import Host, Network, available
from e2e.swarm import CLI, DaemonProcess, Swarm, eventually
from equipoise.peer import connect

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(available() != "", reason=available() or "available"),
]

LISTEN = ["--listen", "/ip4/0.0.0.0/tcp/4001"]
VALUES = 200_000
ROUNDS = 20

CUTTING = f"""
import sys
sys.path.append({str(Path(__file__).parents[1])!r})
from equipoise.dht.relay import service
from equipoise.peer.cli import main
from fakes.cutting import cutting

service.RelayService._pump = cutting(%d)
main()
"""


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """A public host, two behind NATs of their own, and another public one.

    The NATs let no hole be punched, so that what is about relays is carried by relays, unless a test asks for others.
    """
    with Network(hosts=4, **getattr(request, "param", {"symmetric": [1, 2]})) as network:
        yield network


Start = Callable[..., DaemonProcess]


@pytest.fixture
def start(network: Network, swarm: Swarm) -> Start:
    """Starts a daemon on a host."""

    def start(host: Host, join: Sequence[str] = (), args: Sequence[str] = ()) -> DaemonProcess:
        return swarm.daemon(join=join, args=[*LISTEN, *args], prefix=host.command([]))

    return start


def public_address(daemon: DaemonProcess, host: Host) -> str:
    return next(address for address in daemon.addresses if f"/{host.address}/" in address)


def reach(daemon: DaemonProcess) -> Any:
    return daemon.json("status")["swarm"]["reach"]


def settled(daemon: DaemonProcess, state: str) -> str:
    """Wait until the daemon says that it is reached this way; return why."""
    eventually(lambda: reach(daemon)["state"] == state, f"{daemon.home.name} to be {state}")
    return str(reach(daemon)["reason"])


def behind_nats(network: Network, start: Start, relay: DaemonProcess) -> list[DaemonProcess]:
    """Daemons on the hosts behind NATs, once a relay, on the first host, gives each a place."""
    hidden = [start(host, [public_address(relay, network.hosts[0])]) for host in network.hosts[1:3]]
    for daemon in hidden:
        assert "gives a place" in settled(daemon, "relayed")
    return hidden


def average(fleet: Fleet, rounds: int) -> None:
    """Rounds of everybody, each checked against the float64 mean, each from new tensors."""
    for number in range(rounds):
        for value, tensor in zip(fleet.values, fleet.tensors, strict=True):
            value.copy_(torch.randn(VALUES, generator=torch.Generator().manual_seed(number)) + value)
            tensor.copy_(value)
        outcomes = [pending.result() for pending in fleet.start([1.0 + i for i in range(len(fleet.runs))])]
        assert all(len(outcome.contributors) == len(fleet.runs) for outcome in outcomes), outcomes
        fleet.check(dict(enumerate(outcomes)), 1e-6)


@pytest.mark.parametrize("network", [{"symmetric": [1, 2]}, {"nat": [1, 2]}], indirect=True)
def test_two_behind_nats_and_a_public_one_average_exactly(network: Network, start: Start) -> None:
    public = start(network.hosts[0], args=["--relay"])
    hidden = behind_nats(network, start, public)
    assert "reached it at" in settled(public, "direct")

    with Fleet([public, *hidden], normal(3, VALUES), codec="fp32") as fleet:
        average(fleet, ROUNDS)
        rows = {row["peer"]: row for row in public.json("peers")}
    # Those behind NATs say that they are relayed; they have dialled, and their channels are what is used.
    assert {row["reach"] for row in rows.values()} == {"direct"}
    assert sorted(row["why"] for row in rows.values() if not row["me"]) == ["a direct channel is open"] * 2
    # The public member owns all shares: what went through the relay are a few words.
    assert reach(public)["relaying"]["bytes"] < 1.0e6


@pytest.mark.parametrize(
    "network",
    [{"nat": [1, 2]}, {"symmetric": [1], "neighbours": {2: 1}}],
    indirect=True,
    ids=["a NAT each", "one NAT, where neighbours find each other inside"],
)
def test_two_behind_nats_punch_a_hole_and_leave_the_relay_alone(network: Network, start: Start) -> None:
    relay = start(network.hosts[0], args=["--relay"])
    hidden = behind_nats(network, start, relay)
    with Fleet(hidden, normal(2, VALUES), codec="fp32") as fleet:
        average(fleet, 1)
        for daemon, other in zip(hidden, reversed(hidden), strict=True):
            eventually(lambda d=daemon, o=other: "hole punched" in said_of(d, o)["why"], "a hole")
            assert said_of(daemon, other)["reach"] == "direct"
        before = reach(relay)["relaying"]["bytes"]
        average(fleet, ROUNDS)
        relayed = reach(relay)["relaying"]["bytes"] - before
    print(f"{relayed / 1e6:.2f} MB went through the relay in {ROUNDS} rounds")
    # Through it alone it would be twice half a vector each way, in every round.
    assert relayed < 0.1 * ROUNDS * 4 * VALUES * 2


def said_of(daemon: DaemonProcess, other: DaemonProcess) -> Any:
    """What `daemon` says of how it reaches `other`."""
    return next(row for row in daemon.json("peers") if row["peer"] == other.json("status")["swarm"]["peer"])


def test_two_behind_nats_that_cannot_be_punched_average_through_a_relay_that_is_no_member(
    network: Network, start: Start
) -> None:
    relay = start(network.hosts[0], args=["--relay", "--relay-bandwidth", "4e6"])
    hidden = behind_nats(network, start, relay)

    # Their very first call: they do not know each other yet, nor that nobody else is there who could be dialled.
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(daemon.home)) for daemon in hidden]
        runs = [client.join("first", {"w": torch.ones(1000)}) for client in clients]
        pending = [run.average(timeout=30.0, wait=False) for run in runs]
        assert all(pending_round.result().ok for pending_round in pending), [
            pending_round.result() for pending_round in pending
        ]

    with Fleet(hidden, normal(2, VALUES), codec="fp32") as fleet:
        average(fleet, 1)
        for daemon, other in zip(hidden, reversed(hidden), strict=True):
            eventually(
                lambda d=daemon, o=other: "punching failed because" in said_of(d, o)["why"], "it to fail"
            )
            assert said_of(daemon, other)["reach"] == "relayed"
        before, began = reach(relay)["relaying"]["bytes"], time.monotonic()
        average(fleet, ROUNDS)
        rate = (reach(relay)["relaying"]["bytes"] - before) / (time.monotonic() - began)
    print(f"relayed {rate / 1e6:.2f} MB/s of 4 allowed")
    assert rate < 4.4e6


def test_rounds_outlive_a_relay_that_cuts_in_their_midst(
    network: Network, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("e2e.swarm.CLI", (CLI[0], "-c", CUTTING % 4_000_000))
        relay = start(network.hosts[0], args=["--relay"])
    hidden = behind_nats(network, start, relay)

    with Fleet(hidden, normal(2, VALUES), codec="fp32") as fleet:
        average(fleet, ROUNDS)
    log = (relay.home / "daemon.log").read_text()
    cuts = log.count("the most allowed")
    print(f"{cuts} cuts in {ROUNDS} rounds")
    assert cuts >= 2


def test_a_peer_behind_a_nat_is_reachable_through_a_relay(network: Network, start: Start) -> None:
    relay = start(network.hosts[0], args=["--relay"])
    hidden = start(network.hosts[1], [public_address(relay, network.hosts[0])])
    began = time.monotonic()
    relayed = eventually(lambda: _relayed(hidden), "its relayed address")
    seconds = time.monotonic() - began
    print(f"reachable {seconds:.1f} s after its first state")

    stranger = start(network.hosts[3], [relayed])
    status = eventually(lambda: _joined(stranger), "another to join through it")
    assert status["bootstrap"][0]["address"] == relayed


def test_a_peer_whose_router_forwards_its_port_is_dialled_there(network: Network, start: Start) -> None:
    network.forward(network.hosts[1], 4001)
    public = start(network.hosts[0])
    forwarded = start(network.hosts[1], [public_address(public, network.hosts[0])])
    settled(forwarded, "direct")
    known = eventually(
        lambda: next(
            (address for address in forwarded.addresses if f"/{network.hosts[1].public}/" in address), ""
        ),
        "the router's address",
    )
    stranger = start(network.hosts[3], [known])
    eventually(lambda: _joined(stranger), "another to join through it")


def test_a_lost_relay_is_replaced(network: Network, start: Start) -> None:
    first, last = network.hosts[0], network.hosts[3]
    relays = [start(first, args=["--relay"])]
    relays.append(start(last, [public_address(relays[0], first)], ["--relay"]))
    hidden = start(
        network.hosts[1],
        [public_address(relay, host) for relay, host in zip(relays, (first, last), strict=True)],
    )
    eventually(lambda: len(reach(hidden)["relays"]) == 2, "two relays in use")
    relays[0].kill()
    eventually(lambda: len(reach(hidden)["relays"]) == 1, "the dead one to be given up")
    assert reach(hidden)["state"] == "relayed"
    relays[0].start()
    eventually(lambda: len(reach(hidden)["relays"]) == 2, "two relays in use again", 60.0)


def _relayed(daemon: DaemonProcess) -> str:
    return next((address for address in daemon.addresses if "/p2p-circuit/" in address), "")


def _joined(daemon: DaemonProcess) -> Any:
    status = daemon.json("status")["swarm"]
    return status if status["state"] == "joined" and status["bootstrap"][0]["state"] == "connected" else None
