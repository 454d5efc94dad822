"""Codec specs: canonical form, equality, and what is refused."""

from __future__ import annotations

import pytest

from equipoise.compression import CodecError, parse_codec


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("fp32", "fp32"),
        ("fp16", "fp16"),
        ("bf16", "bf16"),
        ("int8", "int8:block=128"),
        ("int8:block=32", "int8:block=32"),
        ("int8:block=0128", "int8:block=128"),
        ("int8:block=4096", "int8:block=4096"),
    ],
)
def test_canonical_spec(spec: str, canonical: str) -> None:
    codec = parse_codec(spec)
    assert codec.spec == canonical
    assert parse_codec(canonical) == codec
    assert hash(parse_codec(canonical)) == hash(codec)


def test_codecs_differ_by_spec() -> None:
    specs = ["fp32", "fp16", "bf16", "int8", "int8:block=256"]
    assert len({parse_codec(spec) for spec in specs}) == len(specs)
    assert parse_codec("fp32") != "fp32"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fp23", ["'fp23'", "fp32, fp16, bf16, int8", "did you mean 'fp32'?"]),
        ("INT8", ["'INT8'", "did you mean 'int8'?"]),
        (" int8", ["' int8'", "did you mean 'int8'?"]),
        ("", ["''", "fp32, fp16, bf16, int8"]),
        ("zstd", ["'zstd'", "fp32, fp16, bf16, int8"]),
        ("a\nb\x1b[31m", [r"'a\nb\x1b[31m'"]),
        ("fp16:block=256", ["fp16 takes no options", "'block=256'"]),
        ("fp16:", ["fp16 takes no options"]),
        ("int8:", ["no option ''", "block"]),
        ("int8:blok=256", ["'blok'", "did you mean 'block'?"]),
        ("int8:block", ["block is a whole number", "''"]),
        ("int8:block=", ["block is a whole number", "''"]),
        ("int8:block=+64", ["whole number", "'+64'"]),
        ("int8:block=1_024", ["whole number", "'1_024'"]),
        ("int8:block=٦٤", ["whole number"]),
        ("int8:block=9999999999", ["whole number"]),
        ("int8:block=64,block=64", ["'block' is given twice"]),
        ("int8:block=0", ["power of two from 32 to 4096", "not 0"]),
        ("int8:block=16", ["power of two from 32 to 4096", "not 16"]),
        ("int8:block=100", ["power of two from 32 to 4096", "not 100"]),
        ("int8:block=8192", ["power of two from 32 to 4096", "not 8192"]),
        ("int8:" + "x" * 100, ["at most 64 characters", "105"]),
    ],
)
def test_refusals_name_what_came_and_what_is_known(spec: str, words: list[str]) -> None:
    with pytest.raises(CodecError) as caught:
        parse_codec(spec)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_refuses_what_is_no_string() -> None:
    with pytest.raises(CodecError, match="string such as 'int8:block=256', not int"):
        parse_codec(8)  # type: ignore[arg-type]
