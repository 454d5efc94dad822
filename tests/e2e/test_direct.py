"""Direct channels of daemons as processes: rounds travel on them, and noise on their ports changes nothing."""

from __future__ import annotations

import contextlib
import random
import socket
from functools import partial
from typing import Any

import psutil
import pytest
import torch

from contracts.run import together
from e2e.swarm import DaemonProcess, Swarm, eventually
from equipoise.averaging.outcome import Idle
from equipoise.dht.direct.handshake import PREFACE_BYTES, Preface
from equipoise.dht.identity import peer_of
from equipoise.peer import connect

pytestmark = pytest.mark.timeout(120)

LOCAL = ["--listen", "/ip4/127.0.0.1/tcp/0"]

STRANGERS = 1000

GROWTH_BYTES = 64 * 1024 * 1024
"""Far above what a daemon's memory wavers by, far below a buffer for each stranger."""


def test_a_round_travels_on_direct_channels_while_strangers_talk(swarm: Swarm) -> None:
    first = swarm.daemon(args=[*LOCAL, "--channel", "aead"])
    daemons = [first, swarm.daemon(join=[first.address], args=[*LOCAL, "--channel", "tls"])]
    _average(daemons)
    before = _memory(daemons[0])
    for daemon in daemons:
        direct = _direct(daemon)
        assert direct["channels"] >= 1, "the round took another way"
        _feed(direct["listening"][0], daemon.json("status")["peer_id"], random.Random(direct["channel"]))
    _average(daemons)
    for daemon in daemons:
        refused = eventually(lambda daemon=daemon: _all_refused(daemon), "every stranger to be counted")
        # Who claims to be somebody unknown is waited for; if they come fast enough to be too many, the oldest go.
        assert set(refused) - {"too many"} == {"malformed preface", "went away", "other peer", "not a member"}
    assert _memory(daemons[0]) - before < GROWTH_BYTES


def _average(daemons: list[DaemonProcess]) -> None:
    with contextlib.ExitStack() as stack:
        runs = []
        for number, daemon in enumerate(daemons):
            peer = stack.enter_context(connect(daemon.home))
            tensors = [torch.full((1_000_000,), float(number))]
            runs.append((peer.join("digits", tensors, codec="fp32", group_size=2), tensors))
        for run, _ in runs:
            eventually(lambda run=run: run.state == Idle(peers=1), "the other daemon", 60.0)
        for outcome in together(*(partial(run.average, 1, 30.0) for run, _ in runs)):
            assert outcome.ok, outcome.reason
        for _, (tensor,) in runs:
            assert torch.equal(tensor, torch.full_like(tensor, 0.5))


def _feed(address: str, daemon: str, rng: random.Random) -> None:
    """Strangers with noise, too short or long enough, and with prefaces of nobody it knows, for it and for others."""
    host, _, port = address.rpartition(":")
    for number in range(STRANGERS):
        stranger, another = (peer_of(rng.randbytes(32)) for _ in range(2))
        said = [
            rng.randbytes(rng.randrange(1, PREFACE_BYTES)),
            rng.randbytes(PREFACE_BYTES + rng.randrange(200)),
            Preface("aead", stranger, another).encode(),
            Preface("tls", stranger, daemon).encode() + rng.randbytes(200),
        ][number % 4]
        with (
            socket.create_connection((host, int(port)), timeout=10) as connection,
            contextlib.suppress(OSError),
        ):
            connection.sendall(said)


def _all_refused(daemon: DaemonProcess) -> dict[str, int]:
    refused: dict[str, int] = _direct(daemon)["refused"]
    return refused if sum(refused.values()) >= STRANGERS else {}


def _direct(daemon: DaemonProcess) -> dict[str, Any]:
    direct: dict[str, Any] = daemon.json("status")["swarm"]["direct"]
    return direct


def _memory(daemon: DaemonProcess) -> int:
    rss: int = psutil.Process(daemon.pid).memory_info().rss
    return rss
