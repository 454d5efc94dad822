from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
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
from equipoise.dht.messages import Message
from equipoise.dht.options import SwarmOptions
from equipoise.dht.p2pd_client import P2pdClient
from equipoise.dht.protocol import REPLICAS, CallError, RecordProtocol
from equipoise.dht.records import SHARDS, TTL_SECONDS, Kept, Readiness, RecordStore, key_of, seal, unseal
from equipoise.dht.state import PROTOCOL_VERSION, ReachStatus
from equipoise.limits import Stand


async def test_ghosts_do_not_keep_news_from_peers_that_are_there(until) -> None:
    ghosts, present = (
        [f"ghost {number:04}" for number in range(4000)],
        [f"peer {number}" for number in range(40)],
    )
    sent: list[str] = []

    async def send(peer: str, records: list[bytes]) -> None:
        sent.append(peer)
        if peer.startswith("ghost"):
            await asyncio.Event().wait()

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

    async def send(peer: str, records: list[bytes]) -> None:
        sent.extend((peer, record) for record in records)
        await answer.wait()

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

    async def send(peer: str, records: list[bytes]) -> None:
        sent.extend(records)
        if len(sent) == 1:
            raise CallError("bob does not answer")

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


class Lone:
    """A peer without p2pd; what its directory sends, and for how long each of its loops waits, is noted.

    Attributes:
        told: Peers that were sent a record, and the record.
        pauses: Waits of the loop that searches for peers, and of the loop that publishes, in seconds.
        replicas: The peers that a look-up finds.
        searches: Number of look-ups so far.
        searching: Is called before a look-up's result.
        ends: Awaited in place of each wait.
    """

    def __init__(self, identity: Identity, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        link = P2pdClient(folder / "nowhere")
        dialer = Dialer(link, identity.peer, DialPolicy(list))
        self.protocol = RecordProtocol(identity.peer, True, link, dialer)
        reach = SimpleNamespace(dialable=True, status=lambda: ReachStatus("direct", "it was dialled"))
        direct = SimpleNamespace(credential=b"")
        self.directory = RunDirectory(identity, SwarmOptions(), self.protocol, reach, direct, sequence=1)
        self.told: list[tuple[str, Readiness]] = []
        self.pauses: dict[str, list[float]] = {"search": [], "publish": []}
        self.replicas: tuple[str, ...] = ()
        self.searches = 0
        self.searching: Callable[[], Awaitable[object]] = _nothing
        self.ends: Callable[[asyncio.Event], Awaitable[object]] = lambda event: asyncio.sleep(0)
        self._patch = monkeypatch
        monkeypatch.setattr(directory, "GAP_SECONDS", 0.0)
        monkeypatch.setattr(self.protocol, "store", self._store)
        monkeypatch.setattr(self.protocol, "look_up", self._look_up)

    def note_pauses(self) -> None:
        """Let no loop wait longer than `ends` takes."""
        self._patch.setattr(directory, "sleep_until", self._sleep_until)

    def know(self, mates: list[str], *keepers: str) -> None:
        """Have `mates` be in the run, and `keepers` keep its records."""
        self.protocol.dialer.connected = frozenset(mates)
        self._patch.setattr(self.directory, "_targets", lambda own: [*mates, *keepers])
        self._patch.setattr(self.directory, "_members", lambda run: mates)

    async def announce(self, accumulated: float = 0.0, left: bool = False) -> None:
        stand = Stand(state="left" if left else "joined", spec="ab", round=1, accumulated=accumulated)
        await self.directory.announce("digits", stand)

    async def take(self, *records: Kept) -> None:
        """A record of each author has come."""
        sender = records[0].subkey
        await self.protocol.take(list(records), sender)
        assert all(self.protocol.intake.store.knows(one, time.monotonic()) for one in records)

    async def _store(self, peer: str, records: list[Kept]) -> None:
        self.told.extend((peer, unseal(kept.data)[0]) for kept in records)

    async def _look_up(self, keys: list[bytes]) -> dict[bytes, tuple[str, ...]]:
        self.searches += 1
        await self.searching()
        return dict.fromkeys(keys, self.replicas)

    async def _sleep_until(self, event: asyncio.Event, seconds: float) -> None:
        loop = "search" if event is self.directory._own["digits"].search else "publish"
        self.pauses[loop].append(seconds)
        await self.ends(event)


async def _nothing() -> None:
    """Let a look-up go on at once."""


@pytest.fixture
def lone(tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch) -> Lone:
    return Lone(identity, tmp_path, monkeypatch)


async def test_a_later_record_of_a_copied_identity_ends_no_renewals(
    lone: Lone, identity: Identity, stranger: Identity, until, monkeypatch
) -> None:
    monkeypatch.setattr(directory, "RENEW_SECONDS", 0.02)
    await lone.take(record_of(stranger, 1), record_of(identity, 2**62))
    await lone.announce()
    own = lone.directory._own["digits"]
    await until(lambda: len(lone.told) >= 3)
    await lone.directory.withdraw("digits")
    assert {peer for peer, _ in lone.told} == {stranger.peer}
    sent = [record for _, record in lone.told]
    assert [record.sequence for record in sent] == sorted({record.sequence for record in sent})
    assert [record.state for record in sent] == ["joined"] * (len(sent) - 1) + ["offline"]
    assert not own.publisher._tasks


async def test_searches_that_find_nobody_new_are_rarer_and_rarer(
    lone: Lone, stranger: Identity, until, monkeypatch
) -> None:
    async def searching() -> None:
        if len(lone.pauses["search"]) == 5:
            await lone.take(record_of(stranger, 1))

    lone.searching = searching
    lone.note_pauses()
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    await lone.announce()
    await until(lambda: len(lone.pauses["search"]) >= 9)
    await lone.directory.stop()
    assert lone.pauses["search"][:9] == [4.0, 8.0, 16.0, 30.0, 30.0, 2.0, 4.0, 8.0, 16.0]


async def test_a_new_peer_of_a_large_swarm_is_asked_itself_and_no_others(
    lone: Lone, stranger: Identity, until, monkeypatch
) -> None:
    asked: list[tuple[str, list[bytes]]] = []

    async def ask(peer: str, keys: list[bytes]) -> None:
        asked.append((peer, keys))

    monkeypatch.setattr(lone.protocol, "ask", ask)
    lone.replicas = tuple(f"replica {number}" for number in range(REPLICAS - 1))
    await lone.announce()
    await until(lambda: lone.searches == 1)
    lone.replicas += ("replica of the swarm that has grown",)
    lone.directory.meet(stranger.peer)
    await until(lambda: lone.searches == 2)
    lone.directory.meet(stranger.peer)
    await until(lambda: asked == [(stranger.peer, [key_of("digits", shard) for shard in range(SHARDS)])])
    await lone.take(record_of(stranger, 1))
    lone.directory.meet(stranger.peer)  # It was slow to answer, and is no news.
    await asyncio.sleep(0)
    await lone.directory.stop()
    assert (lone.searches, len(asked)) == (2, 1)


async def test_records_that_another_way_brings_are_bounded_as_those_of_calls(
    lone: Lone, identity: Identity, stranger: Identity, until
) -> None:
    found, protocol = lone.directory, lone.protocol
    found.receive(stranger.peer, b"no request")
    found.receive(stranger.peer, protocol.pack(identity.peer, [record_of(stranger, 1)]))
    await until(lambda: not protocol.traversals)
    assert [record.peer for record in await found.peers("digits")] == [stranger.peer]
    for _ in range(1000):
        found.receive(stranger.peer, protocol.pack(identity.peer, [record_of(stranger, 2)]))
    await until(protocol._held.locked)
    await protocol.traversals.stop()


async def test_a_record_is_renewed_less_often_where_many_are_told_but_within_its_life(
    lone: Lone, until
) -> None:
    lone.note_pauses()
    await lone.announce()
    for count, pause in ((15, 5.0), (24, 8.0), (100, TTL_SECONDS / 2)):
        lone.replicas = tuple(f"peer {number}" for number in range(count))
        wanted = pytest.approx(pause, abs=0.5)
        await until(lambda wanted=wanted: lone.pauses["publish"][-1:] == [wanted])
        assert len(lone.directory._own["digits"].replicas) == count
    lifetime = lone.directory._seal(lone.directory._own["digits"].record).remaining
    await lone.directory.stop()
    assert lifetime == TTL_SECONDS


async def told_after(lone: Lone, until, accumulated: float, left: bool = False) -> list[str]:
    """The peers that are told at once of so much progress, or of the end of it."""
    lone.told.clear()
    await lone.announce(accumulated, left)
    await until(lambda: lone.told)
    for _ in range(10):
        await asyncio.sleep(0)
    assert {record.accumulated for _, record in lone.told} == {accumulated}
    return sorted(peer for peer, _ in lone.told)


async def test_progress_is_told_to_few_at_once_and_that_a_peer_leaves_to_all(lone: Lone, until) -> None:
    mates = [f"mate {number:02}" for number in range(4 * MAX_TOLD_AT_ONCE)]
    lone.know(mates)
    assert await told_after(lone, until, 0.0) == mates
    called = await told_after(lone, until, 1.0)
    assert len(set(called)) == MAX_CALLED_AT_ONCE
    carried: list[str] = []

    def carry(peer: str, data: bytes) -> bool:
        carried.append(peer)
        return len(carried) < MAX_TOLD_AT_ONCE

    lone.directory.carry = carry
    [last] = await told_after(lone, until, 2.0)
    assert (len(set(carried)), last) == (MAX_TOLD_AT_ONCE, carried[-1])
    assert set(carried) < set(mates)
    assert await told_after(lone, until, 3.0, left=True) == mates
    assert len(carried) == MAX_TOLD_AT_ONCE
    await lone.directory.stop()


async def test_peers_that_only_keep_a_record_are_told_of_progress_at_renewals_and_members_at_once(
    lone: Lone, until
) -> None:
    lone.note_pauses()
    lone.ends = asyncio.Event.wait
    lone.know(["mate"], "keeper")
    assert await told_after(lone, until, 0.0) == ["keeper", "mate"]
    assert await told_after(lone, until, 1.0) == ["mate"]
    assert lone.pauses["publish"][-1] <= RENEW_SECONDS
    lone.directory._own["digits"].told_at -= RENEW_SECONDS
    assert await told_after(lone, until, 2.0) == ["keeper", "mate"]
    await lone.directory.stop()


@pytest.mark.parametrize(("members", "tells"), [(MAX_TOLD_AT_ONCE, True), (MAX_TOLD_AT_ONCE + 1, False)])
async def test_a_newcomer_is_told_at_once_in_a_small_run_only(
    lone: Lone, stranger: Identity, monkeypatch, members: int, tells: bool
) -> None:
    published: list[list[str]] = []
    mates = [f"mate {number}" for number in range(members)]
    monkeypatch.setattr(lone.protocol.intake.store, "peers", lambda run, now: iter(mates))
    await lone.announce()
    publisher = lone.directory._own["digits"].publisher
    monkeypatch.setattr(publisher, "publish", lambda kept, peers: published.append(list(peers)))
    await lone.take(record_of(stranger, 1))
    assert ([stranger.peer] in published) is tells
    await lone.directory.stop()


@pytest.mark.parametrize("heard", [False, True])
async def test_a_late_answer_loses_only_a_peer_that_says_nothing_meanwhile(
    lone: Lone, stranger: Identity, monkeypatch, heard: bool
) -> None:
    said = Message(serves=True)
    lone.protocol._meet(stranger.peer, said)

    async def reach(peer: str) -> None:
        if heard:
            lone.protocol._meet(stranger.peer, said)
        raise TimeoutError

    monkeypatch.setattr(lone.protocol._link, "attached", True)
    monkeypatch.setattr(lone.protocol.dialer, "reach", reach)
    with pytest.raises(CallError, match="does not answer within"):
        await lone.protocol.ping(stranger.peer)
    assert (stranger.peer in lone.protocol.peers) is heard


async def test_each_of_thousands_of_records_costs_as_much_as_the_first(
    lone: Lone, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("equipoise.dht.records.verify", lambda *_: True)
    await lone.announce()
    store, seen = lone.protocol.intake.store, [0]
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
        lone.directory._on_record(store.enter(kept, unseal(kept.data)[0], time.monotonic()))
    assert seen[0] <= count * (MAX_TOLD_AT_ONCE + 1)
    assert len(list(plain(store, "digits", time.monotonic()))) == count + 1
    await lone.directory.withdraw("digits")
