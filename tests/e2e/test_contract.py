"""The contract of `Run` over both faces, with real daemons on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.swarm import Swarm
from equipoise.peer import Client, Peer, connect
from peer.contract import Peers, RunContract

pytestmark = pytest.mark.timeout(180)

LISTEN = "/ip4/127.0.0.1/tcp/0"


@pytest.fixture(params=["connect", "in-process"])
def peers(request: pytest.FixtureRequest, swarm: Swarm, tmp_path: Path) -> Iterator[Peers]:
    with contextlib.ExitStack() as stack:

        def connected(count: int) -> list[Client]:
            daemons = swarm.daemons(count, args=["--listen", LISTEN])
            return [stack.enter_context(connect(daemon.home)) for daemon in daemons]

        def in_process(count: int) -> list[Client]:
            clients: list[Client] = []
            for index in range(count):
                join = clients[0].addresses if clients else ()
                home = tmp_path / f"home{index}"
                clients.append(stack.enter_context(Peer(join=join, home=home, listen=[LISTEN])))
            return clients

        yield connected if request.param == "connect" else in_process


class TestRun(RunContract):
    """All of it."""
