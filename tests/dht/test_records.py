from __future__ import annotations

import math
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.dht import records
from equipoise.dht.address import MAX_ADDRESS_CHARACTERS
from equipoise.dht.identity import Identity, load_or_create, peer_of
from equipoise.dht.options import SwarmOptions
from equipoise.dht.records import (
    MAX_ADDRESSES,
    MAX_RECORD_BYTES,
    MAX_RUN_BYTES,
    MAX_RUNS_PER_PEER,
    MAX_WHY_CHARACTERS,
    TTL_SECONDS,
    Entry,
    Kept,
    Readiness,
    RecordStore,
    check,
    key_of,
    seal,
    shard_of,
    unseal,
)
from equipoise.dht.sanitize import Malformed, decode, printable
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.limits import (
    MAX_COUNT,
    MAX_CREDENTIAL_BYTES,
    MAX_NAME_CHARACTERS,
    MAX_TAG_CHARACTERS,
    MAX_TAGS,
    Stand,
)

NOW = 1000.0


def verified(data: bytes) -> Readiness:
    found, envelope = unseal(data)
    check(found, envelope)
    return found


def record(identity: Identity, **changes) -> Readiness:
    values = {
        "version": PROTOCOL_VERSION,
        "peer": identity.peer,
        "run": "digits",
        "sequence": 1,
        "state": "ready",
    }
    return Readiness(**(values | changes))


def kept(identity: Identity, remaining: float = TTL_SECONDS, **changes) -> Kept:
    one = record(identity, **changes)
    return Kept(one.peer, seal(one, identity), remaining)


def forged(identity: Identity, payload: bytes, run: str = "digits") -> bytes:
    """Signed by its author, but not made by our encoder."""
    name = run.encode()
    signature = identity.sign("readiness", len(name).to_bytes(2, "big") + name + payload)
    return msgspec.msgpack.encode({"payload": payload, "signature": signature})


def accept(record_store: RecordStore, found: Kept, now: float) -> Entry | None:
    """Take a record as the protocol does; None if it is known already."""
    if record_store.knows(found, now):
        return None
    one, envelope = record_store.examine(found)
    check(one, envelope)
    return record_store.enter(found, one, now)


def states(record_store: RecordStore, now: float = NOW) -> dict[str, tuple[int, str]]:
    found = [entry.record for entry in record_store.current("digits", now)]
    return {one.peer: (one.sequence, one.state) for one in found}


def test_round_trip(identity: Identity) -> None:
    one = record(identity, round=3, accumulated=2.5, addresses=("/ip4/127.0.0.1/tcp/1",))
    assert verified(seal(one, identity)) == one


def test_the_largest_record_fits(identity: Identity) -> None:
    longest = {
        "run": "r" * MAX_RUN_BYTES,
        "spec": "f" * 64,
        "round": MAX_COUNT,
        "accumulated": 0.1,
        "bandwidth": 0.1,
        "dialable": True,
        "reach": "unreachable",
        "why": "x" * MAX_WHY_CHARACTERS,
        "addresses": tuple(f"{index:/>{MAX_ADDRESS_CHARACTERS}}" for index in range(MAX_ADDRESSES)),
        "name": "x" * MAX_NAME_CHARACTERS,
        "credential": bytes(MAX_CREDENTIAL_BYTES),
        "tags": tuple(f"{index:.>{MAX_TAG_CHARACTERS}}" for index in range(MAX_TAGS)),
    }
    one = record(identity, **longest)
    assert verified(seal(one, identity)) == one


async def test_a_peers_bandwidth_and_tags_are_announced_and_renewed(members) -> None:
    directory = (await members.start("first")).directory
    stand = Stand(state="ready", spec="ab", round=1, bandwidth=5e6, observes=True)
    await directory.announce("digits", stand)
    (first,) = await directory.peers("digits")
    directory._options = SwarmOptions(tags=("gpu",))
    directory.renew()
    (renewed,) = await directory.peers("digits")
    assert first.sequence < renewed.sequence
    assert first.bandwidth == renewed.bandwidth == 5e6
    assert (first.tags, renewed.tags) == ((), ("gpu",))
    assert (first.observes, renewed.observes) == (True, True)


def test_unknown_fields_are_ignored(identity: Identity) -> None:
    payload = msgspec.msgpack.encode({**msgspec.to_builtins(record(identity)), "later": [1, {"x": None}]})
    assert verified(forged(identity, payload)) == record(identity)


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("author"))


@given(st.data())
def test_no_changed_byte_passes(author: Identity, data: st.DataObject) -> None:
    sealed = bytearray(seal(record(author), author))
    position = data.draw(st.integers(0, len(sealed) - 1))
    sealed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Malformed):
        verified(bytes(sealed))


def test_signed_by_another_is_refused(identity: Identity, stranger: Identity) -> None:
    with pytest.raises(Malformed, match="not signed by"):
        verified(seal(record(identity), stranger))


@pytest.mark.parametrize(
    "change",
    [
        {"accumulated": math.nan},
        {"accumulated": math.inf},
        {"accumulated": -1.0},
        {"bandwidth": math.inf},
        {"round": -1},
        {"sequence": 2**63},
        {"why": "x" * 161},
        {"run": "x" * 129},
        {"run": ""},
        {"spec": "x" * 129},
        {"addresses": ("/a",) * 5},
        {"addresses": ("/" * 513,)},
        {"tags": ("gpu",) * 9},
        {"tags": ("x" * 25,)},
        {"tags": ("g p u",)},
        {"version": PROTOCOL_VERSION + 1},
    ],
)
def test_bounds_hold_for_writers_and_readers(identity: Identity, change: dict) -> None:
    one = record(identity, **change)
    with pytest.raises(Malformed):
        seal(one, identity)
    with pytest.raises(Malformed):
        unseal(forged(identity, msgspec.msgpack.encode(one), one.run))


@pytest.mark.parametrize("value", ["text", None, [], {"a": 1}, True])
def test_wrong_types_are_refused(identity: Identity, value: object) -> None:
    payload = msgspec.msgpack.encode({**msgspec.to_builtins(record(identity)), "sequence": value})
    with pytest.raises(Malformed, match="malformed"):
        unseal(forged(identity, payload))


def test_oversized_and_deep_are_refused(identity: Identity) -> None:
    big = msgspec.msgpack.encode({**msgspec.to_builtins(record(identity)), "later": b"x" * MAX_RECORD_BYTES})
    with pytest.raises(Malformed, match="at most"):
        unseal(forged(identity, big))
    payload = msgspec.msgpack.encode(msgspec.to_builtins(record(identity)) | {"later": None})
    deep = payload[:-1] + b"\x91" * 2000 + b"\x90"
    with pytest.raises(Malformed, match="recursion"):
        unseal(forged(identity, deep))


def test_control_characters_are_escaped_where_shown() -> None:
    assert printable("a\x1b[31m\nb\u202ec") == "a\\x1b[31m\\nb\\u202ec"


HEADS = [
    b"\xdd" + b"\xff" * 4,
    b"\xdf" + b"\xff" * 4,
    b"\xc6" + b"\xff" * 4,
    b"\xdb" + b"\xff" * 4,
    b"\xc9" * 9,
]
"""Of values that announce 2**32 elements or bytes, and have none."""

FIELDS = ["later", "addresses", "peer", "credential", "sequence", "version"]
"""One that is skipped, and some of each type."""


@pytest.mark.parametrize(
    "hostile", [*HEADS, b"\x91" * 60_000 + b"\xc0", b"\x81" * 60_000, b"\x81\xa1a" * 20_000]
)
@pytest.mark.parametrize("field", FIELDS)
def test_messages_that_announce_much_or_nest_deeply_cost_nothing(field: str, hostile: bytes) -> None:
    name = field.encode()
    tracemalloc.start()
    with pytest.raises(Malformed):
        decode(
            msgspec.msgpack.Decoder(Readiness), b"\x81" + bytes([0xA0 | len(name)]) + name + hostile, 100_000
        )
    with pytest.raises(Malformed):
        decode(msgspec.msgpack.Decoder(Readiness), hostile, 100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_record_that_is_cut_off_or_goes_on_is_malformed(identity: Identity) -> None:
    data = kept(identity).data
    for wrong in (*(data[:size] for size in range(len(data))), data + b"\0"):
        with pytest.raises(Malformed, match="malformed"):
            unseal(wrong)


def test_ledger_keeps_the_newest(identity: Identity, stranger: Identity) -> None:
    record_store = RecordStore()
    assert accept(record_store, kept(identity, sequence=5), NOW)
    assert accept(record_store, kept(stranger, sequence=1), NOW)
    assert accept(record_store, kept(identity, sequence=6, state="joined"), NOW)
    assert states(record_store) == {identity.peer: (6, "joined"), stranger.peer: (1, "ready")}
    assert [entry.record.peer for entry in record_store.current("digits", NOW)] == sorted(
        states(record_store)
    )


def test_replays_and_equivocation_are_refused(identity: Identity) -> None:
    record_store = RecordStore()
    old, new = kept(identity, sequence=1), kept(identity, sequence=2)
    accept(record_store, old, NOW)
    accept(record_store, new, NOW)
    assert accept(record_store, new, NOW) is None
    for replayed in (old, kept(identity, sequence=2, round=7)):
        with pytest.raises(Malformed, match="is not after"):
            accept(record_store, replayed, NOW)
    assert states(record_store) == {identity.peer: (2, "ready")}


def test_life_counts_from_the_first_arrival(identity: Identity) -> None:
    record_store = RecordStore()
    one = kept(identity)
    accept(record_store, one, NOW)
    accept(record_store, one, NOW + TTL_SECONDS - 1)
    assert states(record_store, NOW + TTL_SECONDS - 0.1)
    assert not states(record_store, NOW + TTL_SECONDS + 0.1)
    accept(record_store, one, NOW + TTL_SECONDS + 1)
    assert not states(record_store, NOW + TTL_SECONDS + 1)


def test_remaining_life_travels_and_cannot_be_understated_for_good(identity: Identity) -> None:
    record_store = RecordStore()
    accept(record_store, kept(identity, remaining=2.0), NOW)
    assert not states(record_store, NOW + 3)
    accept(record_store, kept(identity, remaining=TTL_SECONDS), NOW)
    assert states(record_store, NOW + TTL_SECONDS - 1)
    assert not states(record_store, NOW + TTL_SECONDS + 1)


@pytest.mark.parametrize("remaining", [0.0, -1.0, TTL_SECONDS + 1, math.nan, math.inf])
def test_absurd_lives_are_refused(identity: Identity, remaining: float) -> None:
    with pytest.raises(Malformed, match="left to live"):
        accept(RecordStore(), kept(identity, remaining=remaining), NOW)


def test_a_foreign_subkey_is_refused(identity: Identity, stranger: Identity) -> None:
    good = kept(identity)
    with pytest.raises(Malformed, match="subkey"):
        accept(RecordStore(), Kept(stranger.peer, good.data, 15.0), NOW)


def test_the_departed_are_gone_at_once_but_their_farewell_is_passed_on(identity: Identity) -> None:
    record_store = RecordStore()
    accept(record_store, kept(identity, sequence=1), NOW)
    farewell = kept(identity, sequence=2, state="offline")
    accept(record_store, farewell, NOW)
    assert not states(record_store)
    assert [one.data for one in record_store.under(key_of("digits", shard_of(identity.peer)), NOW)] == [
        farewell.data
    ]


def test_runs_per_author_are_bounded(identity: Identity) -> None:
    record_store = RecordStore()
    for number in range(MAX_RUNS_PER_PEER):
        accept(record_store, kept(identity, run=f"run {number}"), NOW)
    with pytest.raises(Malformed, match="maximum"):
        accept(record_store, kept(identity, run="one more"), NOW)
    accept(record_store, kept(identity, run="run 0", sequence=2), NOW)


def test_a_run_that_was_left_makes_room_for_another(identity: Identity) -> None:
    record_store = RecordStore()
    for number in range(MAX_RUNS_PER_PEER):
        accept(record_store, kept(identity, run=f"run {number}"), NOW)
    accept(record_store, kept(identity, run="run 7", sequence=2, state="offline"), NOW)
    assert accept(record_store, kept(identity, run="one more"), NOW)
    assert accept(record_store, kept(identity, run="and another"), NOW + TTL_SECONDS + 1)
    assert len(record_store._entries) == MAX_RUNS_PER_PEER


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param({}, id="small"),
        pytest.param({"why": "x" * 160, "credential": bytes(740)}, id="usual"),
        pytest.param(
            {"addresses": ("x" * 511 + "\N{GRINNING FACE}",) * 4, "credential": bytes(900)}, id="large"
        ),
    ],
)
def test_the_memory_of_records_is_bounded(
    author: Identity, monkeypatch: pytest.MonkeyPatch, contents: dict
) -> None:
    # What is measured here is memory.
    monkeypatch.setattr("equipoise.dht.records.verify", lambda *_: True)
    monkeypatch.setattr(author, "sign", lambda *_: bytes(64), raising=False)
    monkeypatch.setattr(records, "MAX_BYTES", records.MAX_BYTES // 8)
    record_store, limit = RecordStore(), records.MAX_BYTES
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1_500):
            peer = peer_of(number.to_bytes(32, "big"))
            run = f"run {number}, " + "x" * 100
            sent = msgspec.msgpack.encode(kept(author, peer=peer, run=run, **contents))
            accept(record_store, msgspec.msgpack.decode(sent, type=Kept), NOW)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert limit / 2 < taken <= limit


def test_records_of_a_peer_that_is_gone_are_void_until_it_says_more(identity: Identity) -> None:
    record_store = RecordStore()
    first = kept(identity)
    accept(record_store, first, NOW)
    record_store.bury(identity.peer, NOW + 1)
    assert not states(record_store, NOW + 1)
    assert accept(record_store, first, NOW + 2) is None, "others still pass it on"
    assert not states(record_store, NOW + 2)
    again = accept(record_store, kept(identity, sequence=2), NOW + 3)
    assert again is not None
    assert again.newcomer
    assert states(record_store, NOW + 3)


def test_a_peer_that_has_left_and_still_serves_is_found_and_says_so(identity: Identity) -> None:
    record_store = RecordStore()
    accept(record_store, kept(identity, state="left"), NOW)
    (entry,) = record_store.current("digits", NOW)
    assert entry.record.left
    assert not entry.record.ready
