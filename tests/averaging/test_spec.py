from __future__ import annotations

import pytest
import torch

from equipoise.averaging.options import MAX_GROUP_SIZE, MAX_PARTS, RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import SHORT_PARTS, RunSpec, SpecError
from fakes.specs import spec

SCHEMA = Schema.of({"w": torch.zeros(10)})


def test_equal_options_have_equal_hashes_however_the_codec_is_spelt() -> None:
    assert (
        RunSpec.create("r", SCHEMA, RunOptions(codec="int8")).hash
        == RunSpec.create("r", SCHEMA, RunOptions(codec="int8:block=128")).hash
    )


@pytest.mark.parametrize(
    "other",
    [
        RunSpec.create("other", SCHEMA),
        RunSpec.create("r", Schema.of({"w": torch.zeros(11)})),
        RunSpec.create("r", Schema.of({"v": torch.zeros(10)})),
        RunSpec.create("r", Schema.of({"w": torch.zeros(10, dtype=torch.float64)})),
        RunSpec.create("r", SCHEMA, RunOptions(codec="fp16")),
        RunSpec.create("r", SCHEMA, RunOptions(group_size=4)),
        RunSpec.create("r", SCHEMA, RunOptions(part_values=512)),
        RunSpec.create("r", SCHEMA, terms={"clip": "1.0"}),
    ],
)
def test_whatever_peers_must_agree_on_changes_the_hash(other: RunSpec) -> None:
    assert other.hash != RunSpec.create("r", SCHEMA).hash


def test_terms_have_no_order() -> None:
    terms = {"optimizer": "AdamW(lr=0.001)", "clip": "1.0"}
    one = RunSpec.create("r", SCHEMA, terms=terms)
    same = RunSpec.create("r", SCHEMA, terms=dict(reversed(terms.items())))

    assert one == same
    assert one.hash == same.hash
    assert one.terms == (("clip", "1.0"), ("optimizer", "AdamW(lr=0.001)"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ring"}, "unknown strategy 'ring'; strategies are allreduce, gossip"),
        ({"strategy": "allreduce:quorum=17"}, "expected a quorum of at most the group size 16, got 17"),
        ({"rule": "maen"}, "did you mean 'mean'?"),
        ({"group_size": 1}, "a group size of 2 to 64, got 1"),
        ({"part_values": 1000}, "a multiple of 256"),
        ({"part_values": 1024, "codec": "int8:block=4096"}, "a multiple of 4096"),
        (
            {"group_size": 33, "codec": "sparse"},
            "at most 32 with codec sparse:group=64, got 33: .* nf4 sends fewer bytes",
        ),
        ({"group_size": 17, "codec": "sparse:group=32"}, "at most 16 with codec sparse:group=32, got 17"),
        (
            {"rule": "median", "codec": "sparse"},
            "expected the rule mean with codec sparse:group=64, got median",
        ),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RunSpec.create("r", SCHEMA, RunOptions(**options))


@pytest.mark.parametrize(
    ("name", "terms", "message"),
    [
        ("", {}, "a run name of 1 to 64 printable characters"),
        ("a\nb", {}, "printable"),
        ("r", {"": "1"}, "a term of 1 to 64 characters of printable ASCII, got ''"),
        ("r", {"x" * 65: "1"}, "a term of 1 to 64"),
        ("r", {"clip": "\x1b[2J"}, "term 'clip': expected at most 256 characters of printable ASCII"),
        ("r", {"clip": "x" * 257}, "term 'clip'"),
        ("r", {"clip": 1.0}, "term 'clip'.*got '1.0'"),
        ("r", {str(index): "" for index in range(33)}, "at most 32 terms, got 33"),
    ],
)
def test_names_and_terms_out_of_range_are_refused(name: str, terms: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RunSpec.create(name, SCHEMA, terms=terms)


def test_an_outcome_counts_its_contributors_only_if_ok() -> None:
    assert Outcome(ok=True, reason="", contributors={"a": 1.0}).counted("a")
    assert not Outcome(ok=True, reason="", contributors={"a": 1.0}).counted("b")
    assert not Outcome(ok=False, reason="", contributors={"a": 1.0}).counted("a")


def test_of_the_largest_vector_a_message_can_name_every_part() -> None:
    most = 512 * (MAX_PARTS - SHORT_PARTS)
    shapes = {"w": (most - 256,), "t": (255,), "u": ()}
    layout = spec(shapes, codec="int8", part_values=512).layout
    for fractions in ([1.0] * MAX_GROUP_SIZE, [1.0 + index / 7 for index in range(MAX_GROUP_SIZE)]):
        assert len(layout.cut(fractions, 512)) <= MAX_PARTS
    with pytest.raises(SpecError, match="raise part_values"):
        spec({**shapes, "s": ()}, codec="int8", part_values=512)
