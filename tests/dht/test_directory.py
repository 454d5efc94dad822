from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from equipoise.dht import directory
from equipoise.dht.dialer import Dialer
from equipoise.dht.dialpolicy import DialPolicy
from equipoise.dht.directory import (
    MAX_CALLED_AT_ONCE,
    MAX_TOLD_AT_ONCE,
    MAX_UNCONNECTED,
    RENEW_SECONDS,
    Publisher,
    RunDirectory,
)
from equipoise.dht.identity import Identity
from equipoise.dht.p2pd_client import P2pdClient
from equipoise.dht.protocol import REPLICAS, CallError, Message, RecordProtocol
from equipoise.dht.records import SHARDS, TTL_SECONDS, Kept, Readiness, RecordStore, key_of, seal, unseal
from equipoise.dht.state import PROTOCOL_VERSION, ReachStatus


async def test_ghosts_do_not_keep_the_news_from_who_is_there(until) -> None:
    ghosts, present = (
        [f"ghost {number:04}" for number in range(4000)],
        [f"peer {number}" for number in range(40)],
    )
    sent: list[str] = []

    async def send(peer: str, records: list[bytes]) -> int:
        sent.append(peer)
        if peer.startswith("ghost"):
            await asyncio.Event().wait()
        return 1

    publisher = Publisher(send, lambda: set(present))
    publisher.publish(b"first", [*ghosts, *present])
    for ghost in ghosts:
        publisher.publish(b"second", [ghost])
    publisher.publish(b"third", [*ghosts, *present])
    await until(lambda: len(publisher._tasks) <= MAX_UNCONNECTED)
    assert set(present) <= set(sent)
    assert sum(peer.startswith("ghost") for peer in sent) <= MAX_UNCONNECTED
    await publisher.close()


async def test_news_for_others_is_not_sent_again_to_a_slow_peer_and_its_own_is(until) -> None:
    sent: list[tuple[str, bytes]] = []
    answer = asyncio.Event()

    async def send(peer: str, records: list[bytes]) -> int:
        sent.extend((peer, record) for record in records)
        await answer.wait()
        return 1

    publisher = Publisher(send, lambda: {"slow", "other", "third"})
    publisher.publish(b"first", ["slow", "other"])
    await until(lambda: len(sent) == 2)
    publisher.publish(b"second", ["other", "third"])
    await until(lambda: len(sent) == 3)
    answer.set()
    await until(lambda: not publisher._tasks)
    assert sent[:2] == [("slow", b"first"), ("other", b"first")]
    assert sorted(sent[2:]) == [("other", b"second"), ("third", b"second")]


async def test_a_farewell_that_did_not_arrive_is_sent_once_more(monkeypatch) -> None:
    monkeypatch.setattr(directory, "RETRY_SECONDS", 0.0)
    sent: list[bytes] = []

    async def send(peer: str, records: list[bytes]) -> int:
        sent.extend(records)
        if len(sent) == 1:
            raise CallError("bob does not answer")
        return 1

    publisher = Publisher(send, set)
    publisher.publish(b"farewell", ["bob"])
    await publisher.close(5.0)
    assert sent == [b"farewell"] * 2


def record_of(identity: Identity, sequence: int) -> Kept:
    record = Readiness(
        version=PROTOCOL_VERSION,
        peer=identity.peer,
        run="digits",
        sequence=sequence,
        state="joined",
    )
    return Kept(identity.peer, seal(record, identity), 15.0)


def directory_of(tmp_path: Path, identity: Identity) -> tuple[RunDirectory, RecordProtocol]:
    link = P2pdClient(tmp_path / "nowhere")
    protocol = RecordProtocol(identity.peer, True, link, Dialer(link, identity.peer, DialPolicy(list)))
    reach = SimpleNamespace(dialable=True, status=lambda: ReachStatus("direct", "it was dialled"))
    return RunDirectory(identity, protocol, reach, sequence=1), protocol


async def test_a_later_record_of_a_copied_identity_ends_no_renewals(
    tmp_path: Path, identity: Identity, stranger: Identity, until, monkeypatch
) -> None:
    monkeypatch.setattr(directory, "RENEW_SECONDS", 0.02)
    announced, protocol = directory_of(tmp_path, identity)
    sent: list[Readiness] = []

    async def store(peer: str, records: list[Kept]) -> int:
        assert peer == stranger.peer
        sent.extend(unseal(kept.data)[0] for kept in records)
        return 1

    monkeypatch.setattr(protocol, "store", store)
    assert await protocol.take([record_of(stranger, 1), record_of(identity, 2**62)], stranger.peer) == 2
    await announced.announce("digits", spec="ab", ready=False, round=1, accumulated=0.0)
    own = announced._own["digits"]
    await until(lambda: len(sent) >= 3)
    await announced.withdraw("digits")
    assert [record.sequence for record in sent] == sorted({record.sequence for record in sent})
    assert [record.state for record in sent] == ["joined"] * (len(sent) - 1) + ["offline"]
    assert not own.publisher._tasks


async def test_searches_that_find_nobody_new_are_rarer_and_rarer(
    tmp_path: Path, identity: Identity, stranger: Identity, until, monkeypatch
) -> None:
    found, protocol = directory_of(tmp_path, identity)
    pauses: list[float] = []

    async def look_up(keys: list[bytes]) -> dict[bytes, tuple[str, ...]]:
        if len(pauses) == 5:
            assert await protocol.take([record_of(stranger, 1)], stranger.peer) == 1
        return dict.fromkeys(keys, ())

    async def sleep_until(event: asyncio.Event, seconds: float) -> None:
        if event is found._own["digits"].search:
            pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(protocol, "look_up", look_up)
    monkeypatch.setattr(directory, "sleep_until", sleep_until)
    monkeypatch.setattr(directory, "GAP_SECONDS", 0.0)
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    await found.announce("digits", spec="ab", ready=False, round=1, accumulated=0.0)
    await until(lambda: len(pauses) >= 9)
    await found.stop()
    assert pauses[:9] == [4.0, 8.0, 16.0, 30.0, 30.0, 2.0, 4.0, 8.0, 16.0]


async def test_a_new_peer_of_a_large_swarm_is_asked_itself_and_no_others(
    tmp_path: Path, identity: Identity, stranger: Identity, until, monkeypatch
) -> None:
    found, protocol = directory_of(tmp_path, identity)
    replicas = [f"replica {number}" for number in range(REPLICAS - 1)]
    searches, asked = 0, []

    async def look_up(keys: list[bytes]) -> dict[bytes, tuple[str, ...]]:
        nonlocal searches
        searches += 1
        return dict.fromkeys(keys, tuple(replicas))

    async def ask(peer: str, keys: list[bytes]) -> None:
        asked.append((peer, keys))

    monkeypatch.setattr(protocol, "look_up", look_up)
    monkeypatch.setattr(protocol, "ask", ask)
    monkeypatch.setattr(directory, "GAP_SECONDS", 0.0)
    await found.announce("digits", spec="ab", ready=False, round=1, accumulated=0.0)
    await until(lambda: searches == 1)
    replicas.append("replica of the swarm that has grown")
    found.meet(stranger.peer)
    await until(lambda: searches == 2)
    found.meet(stranger.peer)
    await until(lambda: asked == [(stranger.peer, [key_of("digits", shard) for shard in range(SHARDS)])])
    assert await protocol.take([record_of(stranger, 1)], stranger.peer) == 1
    found.meet(stranger.peer)  # It was slow to answer, and is no news.
    await asyncio.sleep(0)
    await found.stop()
    assert (searches, len(asked)) == (2, 1)


async def test_records_that_another_way_brings_are_bounded_as_those_of_calls(
    tmp_path: Path, identity: Identity, stranger: Identity, until
) -> None:
    found, protocol = directory_of(tmp_path, identity)
    packed = protocol.pack(identity.peer, [record_of(stranger, 1)])
    found.receive(stranger.peer, b"no request")
    found.receive(stranger.peer, packed)
    await until(lambda: not protocol.traversals)
    assert [record.peer for record in await found.peers("digits")] == [stranger.peer]
    for _ in range(1000):
        found.receive(stranger.peer, protocol.pack(identity.peer, [record_of(stranger, 2)]))
    await until(lambda: protocol._held[stranger.peer] > 0)
    await protocol.traversals.stop()


async def test_a_record_is_renewed_less_often_where_many_are_told_but_within_its_life(
    tmp_path: Path, identity: Identity, until, monkeypatch
) -> None:
    found, protocol = directory_of(tmp_path, identity)
    pauses: dict[int, float] = {}
    replicas: tuple[str, ...] = ()

    async def look_up(keys: list[bytes]) -> dict[bytes, tuple[str, ...]]:
        return dict.fromkeys(keys, replicas)

    async def sleep_until(event: asyncio.Event, seconds: float) -> None:
        if event is found._own["digits"].changed:
            pauses[len(found._own["digits"].replicas)] = seconds
        await asyncio.sleep(0)

    monkeypatch.setattr(protocol, "look_up", look_up)
    monkeypatch.setattr(directory, "sleep_until", sleep_until)
    monkeypatch.setattr(directory, "GAP_SECONDS", 0.0)
    await found.announce("digits", spec="ab", ready=False, round=1, accumulated=0.0)
    for count, pause in ((15, 5.0), (24, 8.0), (100, TTL_SECONDS / 2)):
        replicas = tuple(f"peer {number}" for number in range(count))
        await until(lambda count=count, pause=pause: pauses.get(count) == pytest.approx(pause, abs=0.5))
    lifetime = found._seal(found._own["digits"].record).remaining
    await found.stop()
    assert lifetime == TTL_SECONDS


async def test_progress_is_told_to_few_at_once_and_that_a_peer_leaves_to_all(
    tmp_path: Path, identity: Identity, until, monkeypatch
) -> None:
    found, protocol = directory_of(tmp_path, identity)
    mates = [f"mate {number:02}" for number in range(4 * MAX_TOLD_AT_ONCE)]
    told: list[tuple[str, Readiness]] = []

    async def store(peer: str, records: list[Kept]) -> int:
        told.extend((peer, unseal(kept.data)[0]) for kept in records)
        return 1

    async def announce(accumulated: float, left: bool = False) -> list[str]:
        told.clear()
        await found.announce("digits", spec="ab", ready=False, round=1, accumulated=accumulated, left=left)
        await until(lambda: bool(told))
        for _ in range(10):
            await asyncio.sleep(0)
        assert {record.accumulated for _, record in told} == {accumulated}
        return sorted(peer for peer, _ in told)

    async def nobody(run: str) -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(protocol, "store", store)
    protocol.dialer.connected = frozenset(mates)
    monkeypatch.setattr(found, "_targets", lambda own: mates)
    monkeypatch.setattr(found, "_search", nobody)
    monkeypatch.setattr(directory, "GAP_SECONDS", 0.0)
    assert await announce(0.0) == mates
    called = await announce(1.0)
    assert len(set(called)) == MAX_CALLED_AT_ONCE
    carried: list[tuple[str, bytes]] = []

    def carry(peer: str, data: bytes) -> bool:
        carried.append((peer, data))
        return len(carried) < MAX_TOLD_AT_ONCE

    found.carry = carry
    [last] = await announce(2.0)
    few = {peer for peer, _ in carried}
    assert (len(few), last) == (MAX_TOLD_AT_ONCE, carried[-1][0])
    assert few < set(mates)
    assert await announce(3.0, left=True) == mates
    assert len(carried) == MAX_TOLD_AT_ONCE
    await found.stop()


async def test_peers_that_only_keep_a_record_are_told_of_progress_once_a_second_and_members_at_once(
    tmp_path: Path, identity: Identity, until, monkeypatch
) -> None:
    found, protocol = directory_of(tmp_path, identity)
    told: list[str] = []
    pauses: list[float] = []

    async def store(peer: str, records: list[Kept]) -> int:
        told.append(peer)
        return 1

    async def sleep_until(event: asyncio.Event, seconds: float) -> None:
        pauses.append(seconds)
        await event.wait()

    async def nobody(run: str) -> tuple[str, ...]:
        return ()

    async def announced(accumulated: float) -> set[str]:
        told.clear()
        values = {"spec": "ab", "ready": False, "round": 1}
        await found.announce("digits", accumulated=accumulated, **values)
        await until(lambda: "mate" in told)
        for _ in range(10):
            await asyncio.sleep(0)
        return set(told)

    monkeypatch.setattr(protocol, "store", store)
    monkeypatch.setattr(found, "_targets", lambda own: ["mate", "keeper"])
    monkeypatch.setattr(found, "_members", lambda run: ["mate"])
    monkeypatch.setattr(found, "_search", nobody)
    monkeypatch.setattr(directory, "GAP_SECONDS", 0.0)
    monkeypatch.setattr(directory, "PROGRESS_SECONDS", 60.0)
    monkeypatch.setattr(directory, "sleep_until", sleep_until)
    assert await announced(0.0) == {"mate", "keeper"}
    assert pauses[-1] <= RENEW_SECONDS
    assert await announced(1.0) == {"mate"}
    assert RENEW_SECONDS < pauses[-1] <= 60.0, "then the keeper is told, though nothing changes"
    monkeypatch.setattr(directory, "PROGRESS_SECONDS", 0.0)
    assert await announced(2.0) == {"mate", "keeper"}
    await found.stop()


@pytest.mark.parametrize(("members", "tells"), [(MAX_TOLD_AT_ONCE, True), (MAX_TOLD_AT_ONCE + 1, False)])
async def test_a_newcomer_is_told_at_once_in_a_small_run_only(
    tmp_path: Path, identity: Identity, stranger: Identity, until, monkeypatch, members: int, tells: bool
) -> None:
    found, protocol = directory_of(tmp_path, identity)
    published: list[list[str]] = []

    async def nobody(run: str) -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(found, "_search", nobody)
    mates = [f"mate {number}" for number in range(members)]
    monkeypatch.setattr(protocol.record_store, "peers", lambda run, now: iter(mates))
    await found.announce("digits", spec="ab", ready=False, round=1, accumulated=0.0)
    publisher = found._own["digits"].publisher
    monkeypatch.setattr(publisher, "publish", lambda kept, peers: published.append(list(peers)))
    await protocol.take([record_of(stranger, 1)], stranger.peer)
    assert ([stranger.peer] in published) is tells
    await found.stop()


@pytest.mark.parametrize("heard", [False, True])
async def test_a_late_answer_loses_only_a_peer_that_says_nothing_meanwhile(
    tmp_path: Path, identity: Identity, stranger: Identity, monkeypatch, heard: bool
) -> None:
    _, protocol = directory_of(tmp_path, identity)
    said = Message(serves=True)
    protocol._meet(stranger.peer, said)

    async def reach(peer: str) -> None:
        if heard:
            protocol._meet(stranger.peer, said)
        raise TimeoutError

    monkeypatch.setattr(P2pdClient, "attached", True)
    monkeypatch.setattr(protocol.dialer, "reach", reach)
    with pytest.raises(CallError, match="does not answer within"):
        await protocol.ping(stranger.peer)
    assert (stranger.peer in protocol.peers) is heard


async def test_each_of_thousands_of_records_costs_as_much_as_the_first(
    tmp_path: Path, identity: Identity, monkeypatch
) -> None:
    monkeypatch.setattr("equipoise.dht.records.verify", lambda *_: True)
    announced, protocol = directory_of(tmp_path, identity)
    await announced.announce("digits", spec="ab", ready=False, round=1, accumulated=0.0)
    store, seen = protocol.record_store, [0]
    plain = RecordStore.peers

    def peers(self: RecordStore, run: str, now: float) -> Iterator[str]:
        for peer in plain(self, run, now):
            seen[0] += 1
            yield peer

    monkeypatch.setattr(RecordStore, "peers", peers)
    count = 10 * MAX_TOLD_AT_ONCE
    for number in range(count):
        other = Identity(Ed25519PrivateKey.generate(), tmp_path / str(number))
        kept = record_of(other, 1)
        entry = store.enter(kept, unseal(kept.data)[0], time.monotonic())
        announced._on_record(entry)
    assert seen[0] <= count * (MAX_TOLD_AT_ONCE + 1)
    assert len(list(plain(store, "digits", time.monotonic()))) == count + 1
    await announced.withdraw("digits")
