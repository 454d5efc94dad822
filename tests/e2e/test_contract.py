"""The contract of `Run` over both faces, with real daemons on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from contracts.run import Peers, RunContract, join_all, together
from contracts.state import StateContract
from contracts.stepping import SteppingContract
from e2e.swarm import DaemonProcess, Swarm
from equipoise.peer import Client, Peer, connect

LISTEN = "/ip4/127.0.0.1/tcp/0"


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DaemonProcess]]:
    """Daemon processes that all tests share: a client that closes must leave nothing behind that matters."""
    swarm = Swarm(tmp_path_factory.mktemp("daemons"))
    yield swarm.daemons(3, args=["--listen", LISTEN])
    left = swarm.close()
    assert not left, f"these processes outlived their daemons: {left}"


@pytest.fixture(params=["connect", pytest.param("in-process", marks=pytest.mark.slow)])
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    with contextlib.ExitStack() as stack:

        def connected(count: int) -> list[Client]:
            shared: list[DaemonProcess] = request.getfixturevalue("daemons")
            return [stack.enter_context(connect(daemon.home)) for daemon in shared[:count]]

        def in_process(count: int) -> list[Client]:
            clients: list[Client] = []
            for _ in range(count):
                join = clients[0].addresses if clients else ()
                clients.append(stack.enter_context(Peer(join=join, listen=[LISTEN])))
            return clients

        yield connected if request.param == "connect" else in_process


class TestRun(RunContract):
    """All of it."""


class TestState(StateContract):
    """All of it."""


class TestStepping(SteppingContract):
    """All of it."""

    def test_status_names_peers_whose_steps_are_nearly_equal(self, peers: Peers) -> None:
        clients = peers(2)
        runs = join_all(clients, [[torch.ones(300)] for _ in clients])
        assert all(together(*(run.average for run in runs)))
        for values in ([1.0, 2.0], [3.0, 3.0], [4.0, 4.01]):
            assert not any("nearly equal" in " ".join(one.status().warnings) for one in clients)
            for run, value in zip(runs, values, strict=True):
                run.accumulate([torch.full((300,), value)])
            assert all(together(*(run.step for run in runs)))
        for client in clients:
            (told,) = (warning for warning in client.status().warnings if "nearly equal" in warning)
            assert all(one.peer_id in told for one in clients)
            assert "another seed" in told
