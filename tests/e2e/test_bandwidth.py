"""What a daemon was told of its machine reaches its runs."""

from __future__ import annotations

import torch

from e2e.swarm import Swarm, eventually
from equipoise.peer import connect


def test_the_users_bandwidth_is_the_one_that_peers_hear(swarm: Swarm) -> None:
    daemon = swarm.daemon(
        args=["--listen", "/ip4/127.0.0.1/tcp/0", "--bandwidth", "5e6", "--tag", "gpu", "--tag", "a100"]
    )
    with connect(daemon.home) as client, client.join("digits", [torch.zeros(2)]):
        (row,) = eventually(lambda: daemon.json("peers"), "itself in the directory")
    assert row["bandwidth"] == 5e6
    assert row["tags"] == ["a100", "gpu"]
