from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Gathering, Outcome
from equipoise.averaging.schema import Schema, TensorSpec
from equipoise.averaging.state import MAX_EPOCH
from equipoise.peer.control.messages import (
    LENGTH,
    MAX_FRAME_BYTES,
    MAX_TEXT,
    AskState,
    AskStatus,
    Hello,
    JoinRun,
    LeaveRun,
    Request,
    StartRound,
    decode_answer,
    decode_number,
    decode_reply,
    decode_request,
    encode,
    encode_reply,
)
from equipoise.peer.control.socket import FrameDecoder
from equipoise.peer.errors import ControlError

REQUESTS = [
    Hello(1, "train.py"),
    JoinRun("digits", RunOptions(), Schema((TensorSpec("a", (2, 3), "float32"),)), Schema(()), 6),
]


def decoded(frame: bytes) -> tuple[int, Request[Any]]:
    number, content = decode_number(frame)
    return number, decode_request(content)


@settings(deadline=None)
@given(st.lists(st.sampled_from(REQUESTS), max_size=4), st.integers(1, 40))
def test_frames_survive_any_cut(requests: list[Hello | JoinRun], size: int) -> None:
    stream = b"".join(encode(number, request) for number, request in enumerate(requests))
    decoder = FrameDecoder()

    frames = [frame for at in range(0, len(stream), size) for frame in decoder.feed(stream[at : at + size])]

    assert [decoded(frame) for frame in frames] == list(enumerate(requests))


def test_answers_keep_their_types() -> None:
    outcome = Outcome(ok=True, reason="all", contributors={"p": 1.5})
    for request, answer in (
        (AskState("digits"), Gathering(2, 4)),
        (StartRound("digits", "step", 1.0, 1.0), outcome),
        (LeaveRun("digits"), None),
    ):
        (frame,) = FrameDecoder().feed(encode_reply(7, answer))
        number, failure, content = decode_reply(frame)
        assert (number, failure, decode_answer(request, content)) == (7, None, answer)


def test_a_refusal_is_no_answer_and_one_that_is_long_is_cut() -> None:
    (frame,) = FrameDecoder().feed(encode_reply(7, failure="x" * 5000))
    assert decode_reply(frame)[:2] == (7, "x" * MAX_TEXT)


def test_an_answer_of_another_type_is_refused() -> None:
    (frame,) = FrameDecoder().feed(encode_reply(7, Gathering(2, 4)))
    with pytest.raises(ControlError, match="AskStatus"):
        decode_answer(AskStatus(), decode_reply(frame)[2])


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ControlError, match=f"at most {MAX_FRAME_BYTES}"):
        FrameDecoder().feed(LENGTH.pack(MAX_FRAME_BYTES + 1))


def test_a_message_that_is_too_long_is_not_sent() -> None:
    schema = Schema(tuple(TensorSpec("x" * 500 + str(index), (1,), "float32") for index in range(5000)))
    with pytest.raises(ControlError, match="fuse small ones"):
        encode(1, JoinRun("digits", RunOptions(), schema, Schema(()), 3000))


@pytest.mark.parametrize(
    "stated",
    [
        {"metrics": {"loss": float("nan")}},
        {"metrics": {"l" * 25: 1.0}},
        {"evaluation": [1.0, {"loss": float("inf")}]},
        {"evaluation": [1.0, {"b": "c"}]},
        {"evaluation": [-1.0, {}]},
    ],
)
def test_a_round_whose_metrics_are_not_valid_is_refused(stated: dict[str, object]) -> None:
    asked = {"type": "StartRound", "run": "r", "purpose": "step", "weight": 1.0, "timeout": 1.0}
    _, content = decode_number(msgspec.msgpack.encode((5, {**asked, **stated})))
    with pytest.raises(ControlError, match="a request that the daemon understands"):
        decode_request(content)


DEEP = msgspec.Raw(b"\x91" * 100_000 + b"\xc0")
NOT_UTF8 = msgspec.Raw(b"\x81\xa4type\xa1\xff")


@pytest.mark.parametrize(
    "body",
    [{"type": "Dance"}, {"type": "Hello"}, 7, {"type": "Hello", "version": "x"}, NOT_UTF8],
)
def test_an_unknown_message_can_be_answered(body: object) -> None:
    number, content = decode_number(msgspec.msgpack.encode((5, body)))
    assert number == 5
    with pytest.raises(ControlError, match="a request that the daemon understands"):
        decode_request(content)


@pytest.mark.parametrize("frame", [DEEP, msgspec.msgpack.encode((5, DEEP)), b"\x92\xa1\xff\xc0"])
def test_a_frame_that_is_too_deep_or_not_text_is_refused(frame: bytes) -> None:
    with pytest.raises(ControlError):
        decoded(frame)


START = {"type": "StartRound", "run": "digits", "purpose": "step", "weight": 1.0, "timeout": 1.0}
TENSOR = ("a", (2,), "float32")
JOIN = {
    "type": "JoinRun",
    "run": "digits",
    "options": {},
    "tensors": {"tensors": [TENSOR]},
    "gradients": {"tensors": []},
    "size": 2,
}
FETCH = {"type": "Fetch", "run": "digits", "size": 2, "timeout": 1.0, "wish": {"at_least": MAX_EPOCH}}


@pytest.mark.parametrize(
    ("message", "field", "wrong"),
    [
        *((START, "weight", wrong) for wrong in (-1.0, math.nan, math.inf, "3", True)),
        *((START, "timeout", wrong) for wrong in (0.0, -1.0, 86_401.0, math.nan, math.inf, None)),
        *((FETCH, "wish", {"at_least": wrong}) for wrong in (-1, MAX_EPOCH + 1)),
        (JOIN, "options", {"codec": "x" * 65}),
        (JOIN, "options", {"group_size": -1}),
        *(
            (JOIN, "tensors", {"tensors": wrong})
            for wrong in (
                [("", (2,), "float32")],
                [("x" * 513, (2,), "float32")],
                [("a", (-2,), "float32")],
                [("a", (1,) * 65, "float32")],
                [("a", (2,), "int64")],
                [TENSOR, TENSOR],
            )
        ),
    ],
)
def test_a_field_out_of_its_range_does_not_reach_the_daemon(
    message: dict[str, object], field: str, wrong: object
) -> None:
    decoded(msgspec.msgpack.encode((5, message)))
    with pytest.raises(ControlError):
        decoded(msgspec.msgpack.encode((5, {**message, field: wrong})))
