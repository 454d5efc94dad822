"""A member of the run turns on a daemon: on direct channels that it was admitted to it breaks every rule of the wire.

In each layer there are `CHANNELS` frames that do not decode (of rounds, of matchmaking, of transfers, of no kind) and
as many streams whose records are altered (cut, replayed, reordered, oversized, ...), a ninth for each way to alter
them. Each costs the member its channel. `averaging/aio/test_router_attacks.py` has more messages, at every moment of a
round, `dht/direct/test_aead.py` more altered records, and `test_listener.py` beside it the strangers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from contracts.run import together
from e2e.swarm import DaemonProcess, Swarm, eventually
from equipoise.averaging.aio.round_driver import ROUND_FRAME
from equipoise.averaging.aio.router import Router
from equipoise.averaging.aio.run_driver import MATCHMAKING_FRAME
from equipoise.averaging.aio.transfer import TRANSFER_FRAME
from equipoise.averaging.allreduce import messages as rounds
from equipoise.averaging.manifest import Join
from equipoise.averaging.matchmaking import messages as matchmaking
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Idle
from equipoise.averaging.replication import messages as transfers
from equipoise.averaging.schema import Schema
from equipoise.averaging.session.messages import ENVELOPE_BYTES, FAREWELL
from equipoise.averaging.spec import RunSpec
from equipoise.dht.direct import aead
from equipoise.dht.direct.streams import AeadStream, TlsStream
from equipoise.dht.options import Layer, SwarmOptions
from equipoise.dht.swarm import Swarm as Membership
from equipoise.dht.transport import FramedChannel
from equipoise.peer import Run, connect
from equipoise.peer.daemon.wiring import Signer
from fakes.alterations import ALTERATIONS
from fakes.speaker import Speaker
from fakes.vectors import averaged

pytestmark = pytest.mark.timeout(120)

LAYERS: tuple[Layer, ...] = ("aead", "tls")
LOCAL = "/ip4/127.0.0.1/tcp/0"
VALUES = 1000
OPTIONS: dict[str, Any] = {"codec": "fp32", "group_size": 2}

CHANNELS = 54

UNFIT = (rounds.Contribution(0), rounds.GiveUp("of no use"))
"""Messages of a round that get a body of the wrong size, and a body that they may not have."""

UNASKED = 6
"""Frames that are well-formed, and unasked for, before each that is not."""

STRAY_BYTES = 200_000
"""The body of one more."""

CLOSES_SECONDS = 30.0
"""Until the daemon has closed a channel: at once, on an idle machine."""

GROWTH_BYTES = 48 * 1024 * 1024
"""Far above what a daemon's memory wavers by, and less than half of those bodies."""

REASONS = re.compile(
    "a message of a round|a matchmaking message|a message of a transfer"
    "|got kind|no body of|bytes for part|a body only in frames"
)
"""What its log says was expected of each frame that was none."""

Frame = tuple[bytes, bytes]


def test_a_member_that_breaks_every_rule_is_dropped_and_harms_nobody(swarm: Swarm, tmp_path: Path) -> None:
    victim = swarm.daemon(args=["--listen", LOCAL])
    healthy = swarm.daemon(join=[victim.address], args=["--listen", LOCAL])
    with connect(victim.home) as peer:
        tensor = torch.zeros(VALUES)
        run = peer.join("digits", [tensor], **OPTIONS)
        before = [asyncio.run(_attack(victim, run, tensor, layer, tmp_path / layer)) for layer in LAYERS]
        assert psutil.Process(victim.pid).memory_info().rss - before[0] < GROWTH_BYTES
        tensor.fill_(1.0)
        with connect(healthy.home) as other:
            theirs = torch.full((VALUES,), 3.0)
            second = other.join("digits", [theirs], **OPTIONS)
            for one in (run, second):
                eventually(lambda one=one: one.state == Idle(peers=1), "the healthy daemon", 60.0)
            outcomes = together(*(partial(one.average, 1, 30.0) for one in (run, second)))
            assert all(outcome.ok for outcome in outcomes), outcomes
            assert torch.equal(tensor, torch.full_like(tensor, 2.0))
            assert torch.equal(tensor, theirs)


async def _attack(victim: DaemonProcess, run: Run, tensor: torch.Tensor, layer: Layer, home: Path) -> int:
    """Average with the daemon, so that it admits us; then attack it. Returns the memory it took before."""
    member = Membership(home, SwarmOptions(listen=[LOCAL], join=[victim.address], channel=layer))
    await member.start()
    try:
        router = Router(member.transport, member.directory, Signer(member.identity), direct=member.direct)
        spec = RunSpec.create("digits", Schema.of({"0": tensor}), RunOptions(**OPTIONS))
        run_driver = await router.join(spec)
        pending = run.average(timeout=60, wait=False)
        outcome = await averaged(run_driver, torch.zeros(VALUES), torch.zeros(VALUES), 1.0, 60.0)
        assert outcome.ok, outcome.reason
        assert (await asyncio.to_thread(pending.result)).ok
        (known,) = router._rounds.open
        (daemon,) = set(outcome.group) - {member.peer}
        await router.stop()
        before: int = psutil.Process(victim.pid).memory_info().rss
        intruder = Intruder(member, daemon, spec, known, random.Random(layer))
        for number in range(CHANNELS):
            await intruder.break_frames(number)
        for number in range(CHANNELS):
            await intruder.break_records(number)
    finally:
        await member.stop()
    dropped = _dropped(victim, member.peer)
    assert dropped.pop("records", 0) > CHANNELS / 2, "others end between two records, and look closed"
    assert dropped.total() == CHANNELS
    assert set(dropped) == set(REASONS.pattern.split("|"))
    return before


class Intruder:
    """What an admitted member does to `daemon`, whose round `known` it was in a moment ago."""

    def __init__(
        self, member: Membership, daemon: str, spec: RunSpec, known: bytes, rng: random.Random
    ) -> None:
        self._member = member
        self._daemon = daemon
        self._kinds = (ROUND_FRAME + known, MATCHMAKING_FRAME, TRANSFER_FRAME, b"")
        self._rng = rng
        self._messages = _messages(member.peer, spec)

    async def break_frames(self, number: int) -> None:
        """Send well-formed frames that nobody asked for, some of them twice, then a frame that does not decode."""
        channel = await self._member.direct.open(self._daemon)
        speaker = Speaker(channel)
        await speaker.greet()
        for _ in range(UNASKED):
            await speaker.send(*self._unasked())
        await speaker.send(*self._stray(STRAY_BYTES))
        with contextlib.suppress(ConnectionError):
            await speaker.send(*self._broken_by(number))
        await _closed(channel)

    async def break_records(self, number: int) -> None:
        """On one channel: some frames of no consequence, in records that somebody has altered."""
        channel = await self._member.direct.open(self._daemon)
        speaker = Speaker(channel)
        await speaker.greet()
        frames = [(ROUND_FRAME + self._rng.randbytes(16), b""), self._stray(200), self._stray(100)]
        records = [
            record
            for number, (header, body) in enumerate(frames, start=1)
            for record in _records(channel, (speaker.sealed(header, number), body))
        ]
        altered = ALTERATIONS[number % len(ALTERATIONS)](self._rng, records)
        connection = channel._stream._socket
        with contextlib.suppress(OSError):
            connection.send(b"".join(altered))
            connection.shutdown(socket.SHUT_WR)
        await _closed(channel)

    def _stray(self, size: int) -> Frame:
        chunk = transfers.Item("unknown", bytes(8), bytes(32), 1)
        return TRANSFER_FRAME + transfers.encode(chunk), self._rng.randbytes(size)

    def _unasked(self) -> Frame:
        return self._message(self._rng.choice(self._kinds[:-1]))

    def _message(self, kind: bytes) -> Frame:
        return kind + self._rng.choice(self._messages[kind[:1]]), b""

    def _broken_by(self, number: int) -> Frame:
        """Frames of the round come first, and are few: the daemon forgets it some seconds after its end."""
        if number < len(UNFIT):
            return self._kinds[0] + rounds.encode(UNFIT[number]), b"no such body"
        return self._broken(self._kinds[0 if number < 27 else 1 + number % (len(self._kinds) - 1)])

    def _broken(self, kind: bytes) -> Frame:
        if not kind:
            size = self._rng.choice((1, 100, 128 * 1024 - ENVELOPE_BYTES))
            return b"X" + self._rng.randbytes(size - 1), bytes(self._rng.choice((0, 1, 100_000)))
        if kind != TRANSFER_FRAME and self._rng.randrange(4) == 0:
            return self._message(kind)[0], b"no such body"
        return kind + self._damaged(kind[:1]), b""

    def _damaged(self, kind: bytes) -> bytes:
        """Bytes that hold no message: cut, changed, with something in it, or mere noise, up to as long as may be."""
        rng = self._rng
        while True:
            data = rng.choice(self._messages[kind])
            at = rng.randrange(len(data))
            damaged = rng.choice(
                (
                    data[:at],
                    data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :],
                    data[:at] + rng.randbytes(rng.randrange(1, 100)) + data[at:],
                    data[:at] + data,
                    rng.randbytes(rng.choice((1, 100, 100_000))),
                    b"\x91" * rng.choice((1, 100, 100_000)),
                )
            )
            try:
                DECODERS[kind](damaged)
            except Exception:
                return damaged


DECODERS = {
    ROUND_FRAME: rounds.decode,
    MATCHMAKING_FRAME: matchmaking.decode,
    TRANSFER_FRAME: transfers.decode,
}


def _messages(me: str, spec: RunSpec) -> dict[bytes, list[bytes]]:
    """Messages of each kind, well-formed, and wrong where that can be."""
    run, ticket = spec.name, bytes(8)
    join = Join(me, spec.hash, 9, 1.0, 0.0, True, bytes(16), b"", None, bytes(64))
    votes = rounds.Votes(rounds.Vote(3, rounds.Decision(3, 3), bytes(32)), 3)
    round_messages = (
        rounds.Prepare(2**40),
        votes,
        rounds.Fetch(3, b"\xff" * 100),
        rounds.GiveUp("of no use"),
    )
    matchmaking_messages = (
        matchmaking.JoinRequest(run, join),
        matchmaking.JoinRefused(run, ticket, "full", 2**50),
        matchmaking.LeaveRequest(run, ticket),
        matchmaking.Invitation(run, 9),
    )
    asks = (
        transfers.Ask(run, ticket, spec.hash, 0, (0,)),
        transfers.AskItems(run, ticket, bytes(32), (0, 1)),
    )
    return {
        ROUND_FRAME: list(map(rounds.encode, round_messages)),
        MATCHMAKING_FRAME: list(map(matchmaking.encode, matchmaking_messages)),
        TRANSFER_FRAME: [transfers.encode(message) for message in (*asks, transfers.Finished(run, ticket))],
    }


def _records(channel: FramedChannel, frame: Frame) -> list[bytes]:
    """The records of a frame as `channel` would send them, its body in small pieces."""
    header, body = frame
    plains = [len(header).to_bytes(4, "big") + len(body).to_bytes(4, "big") + header]
    plains += [body[at : at + 64] for at in range(0, len(body), 64)]
    stream = channel._stream
    if isinstance(stream, TlsStream):
        return [stream._tls.seal(plain) for plain in plains]
    assert isinstance(stream, AeadStream)
    room, records = memoryview(bytearray(aead.MAX_HEAD_RECORD_BYTES)), []
    for number, plain in enumerate(plains):
        kind = aead.BODY if number else aead.HEAD
        records.append(bytes(room[: stream._sealer.seal_into(kind, plain, room)]))
    return records


async def _closed(channel: FramedChannel) -> None:
    """Wait until the daemon has closed a channel, whatever it may have said before, but no farewell."""
    try:
        async with asyncio.timeout(CLOSES_SECONDS):
            while True:
                header, _ = await channel.receive(lambda _, size: memoryview(bytearray(size)))
                assert header[:1] != FAREWELL
    except ConnectionError:
        channel.close()


def _dropped(daemon: DaemonProcess, peer: str) -> Counter[str]:
    """Why its log says that it dropped `peer`, and how often; refused records count as `records`. An error is a bug."""
    found: Counter[str] = Counter()
    for path in daemon.home.glob("*.log*"):
        for line in path.read_text().splitlines():
            assert " ERROR " not in line, line
            if f"dropped a channel with {peer}: " in line:
                found["records"] += 1
            elif (at := line.find(f"dropped {peer}: ")) >= 0:
                found[REASONS.search(line, at)[0]] += 1  # type: ignore[index]
    return found
