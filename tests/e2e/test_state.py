"""A state that a newcomer fetches from real daemons, as `status` of both sides describes it."""

from __future__ import annotations

import pytest
import torch

from e2e.swarm import DaemonProcess, eventually
from equipoise.averaging.outcome import Idle
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.state import StateId
from equipoise.peer import connect

PEERS, VALUES = 2, 1000


@pytest.mark.timeout(240)
def test_status_names_the_peer_that_fetches_and_the_peer_that_serves(places: list[DaemonProcess]) -> None:
    with connect(places[0].home) as donor, connect(places[1].home) as newcomer:
        run, fetching = (
            peer.join("small", [torch.zeros(VALUES)], codec="fp32") for peer in (donor, newcomer)
        )
        for own in (run, fetching):
            eventually(lambda own=own: own.state == Idle(peers=1), "the other peer", 60.0)
            own.accumulate([torch.ones(VALUES)], weight=1)
        eventually(lambda: fetching.progress().swarm == 2, "that the other peer steps, too")
        pending = fetching.fetch(Wish(3, 1000))

        eventually(lambda: run.progress().wanted, "the wish")
        assert "1 peer wants the state of epoch 3" in places[0].cli("status").stdout
        assert "fetching a state" in places[1].cli("status").stdout
        assert "peer wants" in donor.status().runs[0].transfer
        run.offer(StateId(3, "3" * 64), b"image")

        fetched = pending.result()
        assert fetched.ok, fetched.reason
        assert pending.content == b"image"
        assert newcomer.status().runs[0].transfer == ""
