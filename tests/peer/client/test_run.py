"""`Run` with a swarm in memory, which can be made to do what real daemons seldom do; its contract runs on those."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.run import OPTIONS, SOON, Peers, join_all, together
from e2e.swarm import eventually
from equipoise.averaging.aio.router import MAX_LEFTOVERS
from equipoise.compression import parse_codec
from equipoise.compression.device_reduce import DeviceReducer
from equipoise.dht.records import MAX_RUNS_PER_PEER
from equipoise.peer import Exchanging, connect
from equipoise.peer.config import load
from equipoise.peer.daemon.service import MAX_RUNS
from equipoise.peer.embedded import DaemonThread, Peer
from equipoise.peer.purposes import PURPOSES
from fakes.daemon import FakeHub, FakeNetwork, FakeRunDriver


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    network = FakeNetwork()
    network.install(monkeypatch)
    return network


@pytest.fixture
def peers(network: FakeNetwork) -> Iterator[Peers]:
    with contextlib.ExitStack() as stack:
        yield lambda count: [stack.enter_context(Peer()) for _ in range(count)]


def test_a_contribution_that_did_not_count_is_kept(peers: Peers, network: FakeNetwork) -> None:
    clients = peers(3)
    runs = join_all(clients, [[torch.zeros(1)] for _ in clients])
    network.refused.add(clients[0].peer_id)
    for index, run in enumerate(runs):
        run.accumulate([torch.full((1,), float(index))], weight=index + 1)
    eventually(lambda: all(run.progress().swarm == 6.0 for run in runs), "each other's progress")

    outcomes = together(*(lambda run=run: run.step(timeout=SOON) for run in runs))

    assert all(outcome.ok for outcome in outcomes)
    assert [run.accumulated for run in runs] == [1.0, 0.0, 0.0]
    torch.testing.assert_close(runs[0].mean["0"], torch.full((1,), 1.6))


def test_exchanging_is_shown(peers: Peers, network: FakeNetwork) -> None:
    runs = join_all(peers(2), [[torch.zeros(1)], [torch.zeros(1)]])
    network.held = True
    pending = [run.average(timeout=SOON, wait=False) for run in runs]

    eventually(lambda: runs[0].state == Exchanging(members=2, round=0), "the exchange")
    with pytest.raises(TimeoutError, match="call result"):
        pending[0].result(timeout=0.01)
    network.release()
    assert all(future.result().ok for future in pending)


def test_the_daemon_forgets_a_client_that_closed(peers: Peers, network: FakeNetwork) -> None:
    clients = peers(2)
    run = clients[0].join("digits", [torch.zeros(1)], **OPTIONS)
    eventually(lambda: list(network.runs.get("digits", ())) == [clients[0].peer_id], "the join")
    clients[0].close()

    assert network.runs["digits"] == {}
    assert run.accumulated == 0.0


def test_status_answers_while_a_run_is_being_left(
    peers: Peers, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, gate = FakeHub.leave, threading.Event()

    async def slow(router: FakeHub, run_driver: FakeRunDriver, reason: str) -> None:
        await leave(router, run_driver, reason)
        await asyncio.to_thread(gate.wait, SOON)

    monkeypatch.setattr(FakeHub, "leave", slow)
    (client,) = peers(1)
    run = client.join("digits", [torch.zeros(1)], **OPTIONS)
    eventually(lambda: "digits" in network.runs, "the join")
    leaving = threading.Thread(target=run.leave)
    leaving.start()
    eventually(lambda: network.runs["digits"] == {}, "the farewell")

    assert [one.name for one in client.status().runs] == ["digits"]
    gate.set()
    leaving.join()


def test_one_that_steps_and_nothing_else_is_one_run_of_the_swarm(peers: Peers, network: FakeNetwork) -> None:
    client, other = peers(2)
    run = client.join("digits", [torch.zeros(1)], **OPTIONS)
    run.agree({"clip": "1.0"})
    other.join("digits", [torch.zeros(1)], **OPTIONS)

    eventually(lambda: "digits" in network.runs, "one that has not said what it does")
    assert list(network.runs["digits/step"]) == [client.peer_id]
    assert list(network.runs["digits"]) == [other.peer_id]
    assert not run.average(timeout=0.1), "the second run of the swarm"
    assert client.peer_id in network.runs["digits"]


def test_status_names_the_kernels_of_a_device_and_says_once_that_it_failed(
    network: FakeNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = DeviceReducer(torch.device("meta"))  # Its tensors have no values: torch raises its own error.
    monkeypatch.setattr("equipoise.peer.daemon.wiring.reducer_for", lambda loaded: reducer)
    daemon = DaemonThread(load({"home": tmp_path / "home"}, {}))
    try:
        with connect(tmp_path / "home") as client:
            client.join("digits", [torch.zeros(1)], **OPTIONS)
            assert client.status().kernels.name.endswith("; torch on meta")
            assert client.status().warnings == ()
            codec, mean = parse_codec("fp32"), bytearray(4)
            for _ in range(2):
                reducer.reduce(codec, [bytearray(4)], [1.0], np.zeros(1, np.float32), mean)
            (warning,) = client.status().warnings
            assert warning.startswith("meta failed, so the CPU reduced the part: ")
    finally:
        daemon.stop()


def test_one_run_more_than_a_daemon_may_have_is_refused_by_name_and_number(
    network: FakeNetwork, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        daemon = DaemonThread(load({"home": tmp_path / "home"}, {}))
        stack.callback(daemon.stop)
        client = stack.enter_context(connect(tmp_path / "home"))
        for number in range(MAX_RUNS):
            client.join(f"run{number}", [torch.zeros(1)], **OPTIONS)
        with pytest.raises(ValueError, match=f"'one more' is one too many.* {MAX_RUNS} runs already"):
            client.join("one more", [torch.zeros(1)], **OPTIONS)


def test_the_records_of_a_full_daemon_are_all_kept() -> None:
    assert MAX_RUNS == 64
    assert MAX_RUNS * len(PURPOSES) + MAX_LEFTOVERS <= MAX_RUNS_PER_PEER
