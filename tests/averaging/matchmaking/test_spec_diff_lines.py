"""What a peer tells of its spec, and how two of them differ."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.matchmaking.messages import MAX_ROWS, SpecAnswer, SpecQuestion
from equipoise.averaging.matchmaking.spec_diff import MAX_DIFFERENCES, answer_of, differences
from equipoise.averaging.options import MARK_BYTES, MAX_MARKS, MAX_TERMS
from equipoise.averaging.schema import MAX_NAME_CHARS, Schema
from equipoise.averaging.spec import PLACES, PROTOCOL_VERSION, RunSpec
from equipoise.limits import MAX_HEADER_BYTES
from fakes.specs import TENSORS, spec


def told(here: RunSpec, there: RunSpec) -> str:
    """What a peer can say of another one that has answered it."""
    return differences(here, answer_of(there, here.marks, 1.0))


def test_nothing_differs_between_equals() -> None:
    assert told(spec(), spec()) == ""
    assert answer_of(spec(), spec().marks, 1.0).place is None


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            spec({"a": (2,), "b": (4, 3), "c": (5,)}),
            "tensor 1: here 'b' float32 [3, 4], there 'b' float32 [4, 3]",
        ),
        (
            spec({"a": (2,), "b": (3, 4)}),
            "tensor 2: here 'c' float32 [5], there nothing; "
            "model: here 19 values in 3 tensors, there 14 values in 2 tensors",
        ),
        (
            spec({**TENSORS, "d": (1,)}),
            "model: here 19 values in 3 tensors, there 20 values in 4 tensors; "
            "tensor 3: here nothing, there 'd' float32 [1]",
        ),
        (spec(codec="fp16"), "codec: here fp32, there fp16"),
        (spec(group_size=4), "group size: here 16, there 4"),
        (spec(part_values=512), "part values: here 1048576, there 512"),
        (spec(weights="any"), "weights: here capped:10, there any"),
        (spec(terms={"clip": "1.0"}), "clip: here nothing, there 1.0"),
    ],
)
def test_what_differs_is_named(there: RunSpec, said: str) -> None:
    assert told(spec(), there) == said


def test_of_long_values_the_part_that_differs_is_shown() -> None:
    here, there = (spec(terms={"data": f"{'a' * 90} {part} {'b' * 90}"}) for part in ("one", "two"))
    assert "aaa one bbb" in told(here, there)
    assert "aaa two bbb" in told(here, there)
    assert len(told(here, there)) < 160


def test_of_named_values_those_that_differ_are_shown() -> None:
    options = "lr={}, betas=({}, 0.999), eps=1e-08, fused=None, capturable=False"
    here, there = (spec(terms={"group 1": options.format(*one)}) for one in ((0.0002, 0.9), (0.0001, 0.8)))
    assert told(here, there) == (
        "group 1: lr: here 0.0002, there 0.0001; betas: here (0.9, 0.999), there (0.8, 0.999)"
    )


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        (("abc", "xbc"), "'a' has another place there"),
        (("abc", "abx"), "'c' has another place there"),
        (("ab", "ax"), "'c' or one of the 1 after it has another place there"),
        (("abc", "ab"), "here 1: 00 abc, there 1: 00 ab"),
        (("", "ab"), "here 1: 00 , there 1: 00 ab"),
        (("abcdefg", "abcdefx"), "here 1: 00 abcdefg, there 1: 00 abcdefx"),
    ],
)
def test_a_parameter_with_another_place_in_the_optimizer_is_named(marks: tuple[str, str], said: str) -> None:
    here, there = (spec(terms={PLACES: f"1: 00 {one}"}) for one in marks)
    assert told(here, there) == f"parameter groups: {said}"


def test_a_long_name_of_a_tensor_is_whole() -> None:
    name = "base_model.model.model.layers.17.self_attn.q_proj.lora_A.default.weight"
    said = told(spec({name: (8, 4096)}), spec({name: (16, 4096)}))
    assert f"here '{name}' float32 [8, 4096], there '{name}' float32 [16, 4096]" in said


def test_a_line_does_not_name_everything() -> None:
    many = spec(terms={str(index): "here" for index in range(MAX_TERMS)}, codec="fp16")
    said = told(spec(), many)
    assert said.count(";") == MAX_DIFFERENCES
    assert said.endswith(f"and {MAX_TERMS + 1 - MAX_DIFFERENCES} more")


def test_another_version_is_all_there_is_to_say_and_which_side_is_older() -> None:
    for version, older in ((99, "here"), (1, "there")):
        there = msgspec.structs.replace(answer_of(spec(codec="fp16"), spec().marks, 1.0), version=version)
        assert differences(spec(), there) == (
            f"protocol version: here {PROTOCOL_VERSION}, there {version}; "
            f"the equipoise {older} is older: upgrade it with pip install --upgrade equipoise"
        )


def test_of_very_many_tensors_what_lies_behind_the_marks_is_counted() -> None:
    names = [f"t{index}" for index in range(MAX_MARKS + 2)]
    here = spec(dict.fromkeys(names, (1,)))
    there = spec(dict.fromkeys(names[:-1], (1,)))
    assert len(here.marks) == MARK_BYTES * MAX_MARKS
    assert told(here, there) == (
        f"model: here {MAX_MARKS + 2} values in {MAX_MARKS + 2} tensors, "
        f"there {MAX_MARKS + 1} values in {MAX_MARKS + 1} tensors"
    )


def test_the_largest_description_fits_a_header_and_is_understood() -> None:
    name = "ü" * MAX_NAME_CHARS
    tensors = {f"{index}{name}"[:MAX_NAME_CHARS]: (1,) * 64 for index in range(MAX_MARKS + 1)}
    terms = {f"{index:064}": "x" * 256 for index in range(MAX_TERMS)}
    largest = spec(tensors, terms=terms)
    encoded = msgspec.msgpack.encode(answer_of(largest, b"", 1.0))
    assert len(encoded) < MAX_HEADER_BYTES / 2
    assert (
        len(msgspec.msgpack.encode(SpecQuestion("run", largest.hash, largest.marks))) < MAX_HEADER_BYTES / 2
    )
    assert msgspec.msgpack.decode(encoded, type=SpecAnswer).place == 0


def test_names_that_are_not_printable_are_escaped() -> None:
    here = spec({"\x1b[2J\n": (1,)})
    assert r"'\x1b[2J\n' float32 [1]" in told(here, spec({"a": (1,)}))


WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=64)

ANSWERS = st.builds(
    SpecAnswer,
    st.just("run"),
    st.just(spec().hash),
    st.just(1.0),
    st.sampled_from([PROTOCOL_VERSION, PROTOCOL_VERSION + 1]),
    st.none() | st.integers(0, 2**53) | st.integers(0, 4),
    st.lists(st.tuples(WORDS | st.just("clip"), st.text("ab \"'", max_size=256)), max_size=3).map(tuple),
)


@given(ANSWERS)
def test_whatever_a_stranger_tells_comes_to_one_short_printable_line(there: SpecAnswer) -> None:
    line = differences(spec(), there)
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 1000


@given(st.binary(max_size=99))
def test_whatever_marks_a_stranger_sends_the_answer_is_within_bounds(marks: bytes) -> None:
    told = msgspec.msgpack.encode(answer_of(spec(), marks, 1.0))
    assert msgspec.msgpack.decode(told, type=SpecAnswer).place is not None


@pytest.mark.parametrize(
    "change",
    [
        {"table": (("a", "\x1b[2J"),)},
        {"table": (("a", "b" * 257),)},
        {"table": (("a" * 65, "b"),)},
        {"table": tuple((str(index), "") for index in range(MAX_ROWS + 1))},
        {"version": -1},
        {"place": 2**60},
    ],
)
def test_what_is_out_of_bounds_does_not_decode(change: dict[str, Any]) -> None:
    wrong = msgspec.structs.replace(answer_of(spec(), b"", 1.0), **change)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=SpecAnswer)


def test_too_many_marks_do_not_decode() -> None:
    wrong = SpecQuestion("run", spec().hash, b"x" * (MARK_BYTES * MAX_MARKS + 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=SpecQuestion)


def test_marks_tell_tensors_apart_by_name_shape_and_dtype() -> None:
    tensors = [
        {"a": torch.zeros(2)},
        {"b": torch.zeros(2)},
        {"a": torch.zeros(3)},
        {"a": torch.zeros(2).double()},
    ]
    marks = {RunSpec.create("run", Schema.of(each)).marks for each in tensors}
    assert len(marks) == len(tensors)
