"""Direct channels of daemons as processes: rounds travel on them, whichever layer each daemon dials with."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch

from contracts.run import together
from e2e.swarm import Swarm, eventually
from equipoise.averaging.outcome import Idle
from equipoise.peer import connect

LOCAL = ["--listen", "/ip4/127.0.0.1/tcp/0"]


@pytest.mark.timeout(120)
def test_a_round_travels_on_direct_channels(swarm: Swarm) -> None:
    first = swarm.daemon(args=[*LOCAL, "--channel", "aead"])
    daemons = [first, swarm.daemon(join=[first.address], args=[*LOCAL, "--channel", "tls"])]
    tensors = [torch.full((1_000_000,), float(number)) for number in range(2)]
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(connect(daemon.home)) for daemon in daemons]
        runs = [
            peer.join("digits", [tensor], codec="fp32", group_size=2)
            for peer, tensor in zip(peers, tensors, strict=True)
        ]
        for run in runs:
            eventually(lambda run=run: run.state == Idle(peers=1), "the other daemon", 60.0)
        for outcome in together(*(partial(run.average, 1, 30.0) for run in runs)):
            assert outcome.ok, outcome.reason
        assert all(torch.equal(tensor, torch.full_like(tensor, 0.5)) for tensor in tensors)
        for daemon in daemons:
            direct = daemon.json("status")["swarm"]["direct"]
            assert direct["channels"] >= 1, "the round took another way"
