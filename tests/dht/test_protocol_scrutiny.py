"""What the records of strangers cost: signatures verified, in virtual time and at the protocol's own handlers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from equipoise.dht import messages, records
from equipoise.dht.dialer import Dialer
from equipoise.dht.dialpolicy import DialPolicy
from equipoise.dht.identity import Identity, peer_of
from equipoise.dht.limits import (
    DISTRUST_SECONDS,
    KNOWN_BURST,
    KNOWN_PER_SECOND,
    SIGNATURES_BURST,
    SIGNATURES_PER_SECOND,
    UNKNOWN_BURST,
    UNKNOWN_PER_SECOND,
    Scrutiny,
)
from equipoise.dht.p2pd_client import P2pdClient
from equipoise.dht.protocol import HELD_SECONDS, MAX_HELD, RecordProtocol
from equipoise.dht.records import Kept, Readiness, seal
from equipoise.dht.sanitize import Malformed
from equipoise.dht.state import PROTOCOL_VERSION
from fakes.hostile import run_at_once

SECONDS = 10


def peer(number: int) -> str:
    return peer_of(number.to_bytes(32, "big"))


def test_senders_have_a_budget_each_and_one_for_hearsay_together() -> None:
    scrutiny = Scrutiny()
    verified = sum(
        scrutiny.admits(f"sender {sender}", f"author {author}", True, step / 100)
        for step in range(100 * SECONDS)
        for sender in range(4)
        for author in range(5)
    )
    assert verified <= UNKNOWN_BURST + UNKNOWN_PER_SECOND * SECONDS
    of_itself = sum(scrutiny.admits("mate", "mate", True, step / 1000) for step in range(1000 * SECONDS))
    assert (
        SIGNATURES_PER_SECOND * SECONDS < of_itself <= SIGNATURES_BURST + SIGNATURES_PER_SECOND * SECONDS + 1
    )


@pytest.mark.parametrize(
    ("known", "rate", "burst"),
    [(False, UNKNOWN_PER_SECOND, UNKNOWN_BURST), (True, KNOWN_PER_SECOND, KNOWN_BURST)],
)
def test_records_of_many_peers_about_themselves_have_a_budget_in_all(
    known: bool, rate: float, burst: float
) -> None:
    scrutiny = Scrutiny()
    verified = sum(
        scrutiny.admits(f"peer {number}", f"peer {number}", known, step / 10)
        for step in range(10 * SECONDS)
        for number in range(500)
    )
    assert rate * SECONDS <= verified <= burst + rate * SECONDS
    assert scrutiny.admits("mate", "mate", not known, SECONDS), (
        "known and new peers do not crowd each other out"
    )


def test_a_forger_is_not_looked_at_for_a_while() -> None:
    scrutiny = Scrutiny()
    scrutiny.distrust("forger", 0.0)
    assert not scrutiny.admits("forger", "forger", True, DISTRUST_SECONDS - 1)
    assert scrutiny.admits("forger", "forger", True, DISTRUST_SECONDS)
    assert scrutiny.admits("other", "forger", True, 0.0)


@pytest.fixture
def protocol(tmp_path: Path) -> RecordProtocol:
    own, link = peer(0), P2pdClient(tmp_path / "nowhere")
    return RecordProtocol(own, True, link, Dialer(link, own, DialPolicy(list)))


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The authors whose signatures were verified; what stands for one is zeros."""
    seen: list[str] = []

    def verify(author: str, domain: str, data: bytes, signature: bytes) -> bool:
        seen.append(author)
        return signature == bytes(64)

    monkeypatch.setattr(records, "verify", verify)
    return seen


def store(identity: Identity, author: str, sequence: int = 1) -> Kept:
    record = Readiness(
        version=PROTOCOL_VERSION,
        peer=author,
        run="digits",
        sequence=sequence,
        state="ready",
    )
    return Kept(author, seal(record, identity), 15.0)


async def send(protocol: RecordProtocol, sender: str, kept: list[Kept]) -> int:
    request = messages.encode(messages.Message(serves=False, records=tuple(kept)))
    await protocol._answer(sender, request)
    return sum(protocol.intake.store.knows(one, time.monotonic()) for one in kept)


def test_forged_records_cost_one_signature_for_each_sender(
    protocol: RecordProtocol, verified: list[str], identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forge() -> None:
        for sender in range(1, 5):
            for call in range(100):
                forged = [store(identity, peer(1000 * sender + 10 * call + number)) for number in range(10)]
                with contextlib.suppress(Malformed):
                    assert await send(protocol, peer(sender), forged) == 0
        assert len(verified) == 4
        monkeypatch.setattr(identity, "sign", lambda *_: bytes(64), raising=False)
        assert await send(protocol, peer(9), [store(identity, peer(9))]) == 1

    assert run_at_once(forge()) == []


def test_a_forger_waits_for_each_refusal(
    protocol: RecordProtocol, verified: list[str], identity: Identity
) -> None:
    forged, refused = [store(identity, peer(2))], []

    async def call(sender: int) -> None:
        with pytest.raises(Malformed, match="forged"):
            await send(protocol, peer(sender), forged)
        refused.append(asyncio.get_running_loop().time())

    async def forge() -> None:
        for sender in range(1, 10):
            assert await send(protocol, peer(sender), forged) == 0
        for _ in range(5):
            await asyncio.gather(*(call(1) for _ in range(8)))
        assert refused[-1] == 5 * HELD_SECONDS
        refused.clear()
        await asyncio.gather(*(call(1 + number % 9) for number in range(900)))
        assert refused.count(refused[-1]) == MAX_HELD, "the others do not fill the memory"

    assert run_at_once(forge()) == []


async def test_genuine_records_of_strangers_do_not_keep_out_what_a_peer_says_of_itself(
    protocol: RecordProtocol, verified: list[str], identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "sign", lambda *_: bytes(64), raising=False)
    for call in range(40):
        ghosts = [store(identity, peer(1000 * call + number)) for number in range(1, 101)]
        await send(protocol, peer(1 + call % 4), ghosts)
    spent = len(verified)
    assert spent < 4 * SIGNATURES_BURST
    own = store(identity, peer(50_000))
    assert await send(protocol, peer(50_000), [own]) == 1
    assert await send(protocol, peer(50_000), [own]) == 1
    assert len(verified) == spent + 1, "what is known is not verified again"


async def test_cheaper_checks_come_before_the_signature(
    protocol: RecordProtocol, verified: list[str], identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "sign", lambda *_: bytes(64), raising=False)
    await send(protocol, peer(9), [store(identity, peer(9), sequence=5)])
    verified.clear()
    wrong = store(identity, peer(9), sequence=6)
    for kept in (
        store(identity, peer(9), sequence=4),
        Kept(peer(8), wrong.data, 15.0),
    ):
        assert await send(protocol, peer(7), [kept]) == 0
    assert verified == []
