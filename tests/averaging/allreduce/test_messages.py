"""Messages of a round: what is encoded is decoded, and nothing that comes does more than be refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.messages import Decision, RoundMessage, decode, encode, from_bits, to_bits
from equipoise.averaging.options import MAX_PARTS
from equipoise.averaging.ports import FrameRefused
from equipoise.limits import MAX_HEADER_BYTES

members = st.integers(0, 2**64 - 1)
ballots = st.integers(0, wire.MAX_BALLOT)
decisions = st.builds(Decision, members, members)
digests = st.binary(min_size=32, max_size=32)
parts = st.integers(0, MAX_PARTS - 1)

every_message = st.one_of(
    st.builds(wire.Prepare, ballots),
    st.builds(wire.Promise, ballots, st.none() | ballots, st.none() | decisions),
    st.builds(wire.Refuse, ballots),
    st.builds(wire.Plan, ballots, ballots, members),
    st.builds(wire.Report, ballots, ballots, members),
    st.builds(wire.Propose, ballots, decisions, members),
    st.builds(wire.Votes, st.builds(wire.Vote, ballots, decisions, digests), members),
    st.builds(wire.Fetch, members, st.binary(max_size=MAX_PARTS // 8)),
    st.builds(wire.GiveUp.because, st.text()),
    st.just(wire.Heartbeat()),
    st.builds(wire.Contribution, parts),
    st.builds(wire.Mean, parts, members),
)


def refused(data: bytes) -> bool:
    try:
        decode(data)
    except FrameRefused:
        return True
    return False


@given(every_message)
def test_an_encoded_message_is_decoded(message: RoundMessage) -> None:
    data = encode(message)
    assert decode(data) == message
    assert len(data) <= MAX_HEADER_BYTES


def raw(kind: str, **fields: object) -> bytes:
    return msgspec.msgpack.encode({"type": kind, **fields})


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(raw("Prepare", ballot=-1), id="negative ballot"),
        pytest.param(raw("Prepare", ballot=wire.MAX_BALLOT + 1), id="ballot too high"),
        pytest.param(raw("Prepare", ballot=1.5), id="broken ballot"),
        pytest.param(raw("Prepare", ballot="1"), id="ballot in letters"),
        pytest.param(raw("Prepare"), id="no ballot"),
        pytest.param(raw("Praepare", ballot=1), id="unknown kind"),
        pytest.param(raw("Propose", ballot=1, decision=[7]), id="half a decision"),
        pytest.param(raw("Propose", ballot=1, decision=[-7, 7]), id="negative members"),
        pytest.param(raw("Votes", vote=[1, [7, 7], b"d" * 31], voters=7), id="short digest"),
        pytest.param(raw("Votes", vote=[1, [7, 7], b"d" * 33], voters=7), id="long digest"),
        pytest.param(raw("Fetch", contributors=7, parts=bytes(MAX_PARTS // 8 + 1)), id="too many parts"),
        pytest.param(raw("GiveUp", reason="x" * (wire.MAX_REASON_CHARS + 1)), id="long reason"),
        pytest.param(raw("Contribution", part=MAX_PARTS), id="part too high"),
        pytest.param(raw("Mean", part=-1, contributors=7), id="negative part"),
        pytest.param(b"\x81" * 5000, id="deep"),
        pytest.param(b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 60_000 + b"\x00", id="deep and unknown"),
        pytest.param(b"\x82\xa4type\xa6GiveUp\xa6reason\xa2\xff\xfe", id="bytes that are not text"),
        pytest.param(b"", id="empty"),
        pytest.param(encode(wire.Heartbeat()) + b"\x00", id="more behind"),
    ],
)
def test_a_message_that_does_not_fit_is_refused(data: bytes) -> None:
    assert refused(data)


def test_fields_of_later_versions_are_ignored() -> None:
    assert decode(raw("Prepare", ballot=3, colour="blue")) == wire.Prepare(3)


@given(st.sets(st.integers(0, MAX_PARTS - 1), max_size=50))
def test_parts_as_bits(chosen: set[int]) -> None:
    bits = to_bits(chosen)
    assert from_bits(bits) == sorted(chosen)
    assert len(bits) <= MAX_PARTS // 8
