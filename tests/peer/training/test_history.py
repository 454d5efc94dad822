"""The history of a federated training, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from equipoise.averaging.metrics import middles
from equipoise.averaging.outcome import Outcome
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.training.history import REPLICATED_ROUNDS, Ending, History, Record, Until
from equipoise.peer.training.image import SPARE_BYTES

DIGEST = "ab" * 32


def record(number: int, value: float | None = None, **fields: Any) -> Record:
    evaluation = {} if value is None else {"accuracy": value}
    return Record(
        number=number, contributors={"b": 2.0, "a": 1.0}, evaluation=evaluation, digest=DIGEST, **fields
    )


def history(*values: float | None) -> History:
    return History([record(at + 1, value) for at, value in enumerate(values)])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("accuracy >= 0.95", "accuracy >= 0.95"),
        ("accuracy>=.95", "accuracy >= 0.95"),
        (" val loss<1e-2 ", "val loss < 0.01"),
        ("loss <= -3", "loss <= -3.0"),
        ("a > 0", "a > 0.0"),
        ("x" * 24 + " < 1", "x" * 24 + " < 1.0"),
    ],
)
def test_conditions_are_read(text: str, told: str) -> None:
    assert str(Until.parse(text)) == told
    assert Until.parse(told) == Until.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "accuracy",
        "accuracy == 1",
        ">= 1",
        "a >= one",
        "a >= nan",
        "a >= inf",
        "x" * 25 + " < 1",
        "a < 1 2",
        3,
    ],
)
def test_what_is_no_condition_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"^until: expected NAME >= NUMBER, with >=, <=, > or <, as "):
        Until.parse(text)


@pytest.mark.parametrize(
    ("operator", "below", "at", "above"),
    [
        (">=", False, True, True),
        (">", False, False, True),
        ("<=", True, True, False),
        ("<", True, False, False),
    ],
)
def test_operators_mean_what_they_say(operator: str, below: bool, at: bool, above: bool) -> None:
    until = Until("x", operator, 2.0)
    assert (until.holds(1.0), until.holds(2.0), until.holds(3.0)) == (below, at, above)


def test_a_training_ends_by_its_rounds() -> None:
    ending = Ending(2, None, 0)
    assert ending.reason(History()) == ending.reason(history(None)) == ""
    assert ending.reason(history(None, None)) == "all 2 rounds are made"
    assert Ending(None, None, 0).reason(history(*[None] * 99)) == ""


def test_a_training_ends_by_its_condition() -> None:
    ending = Ending(9, Until.parse("accuracy >= 0.9"), 0)
    assert ending.reason(history(0.5, None, 0.89)) == ""
    assert ending.reason(history(0.5, 0.95)) == ending.reason(history(0.95, 0.5, 0.95)) == ""
    assert ending.reason(history(0.5, 0.95, 0.9)) == "accuracy >= 0.9 in rounds 2 and 3: 0.9"


def test_evaluations_of_a_few_end_nothing() -> None:
    def ended(until: str, *values: float) -> str:
        medians = middles((1.0, {"accuracy": value}) for value in values)
        records = [record(at, 1e9, medians=medians) for at in (1, 2, 3, 4)]
        return Ending(None, Until.parse(until), 2).reason(History(records))

    stands = "accuracy has not improved for 3 rounds: "
    assert ended("accuracy >= 0.9", 0.5, 0.6, 1e9, 1e9) == stands + "0.6 in round 1", (
        "the lower of two medians"
    )
    assert ended("accuracy <= 0.4", 0.5, 0.6, -1e9, -1e9) == stands + "0.5 in round 1"
    assert ended("accuracy >= 0.9", 0.5, 1e9, 1e9) == "", "no accuracy is above 1"
    assert ended("accuracy >= 90", 50, 95, 96) == "accuracy >= 90.0 in rounds 1 and 2: 95", "in percent"


def test_the_evaluation_comes_before_the_metrics_of_the_training() -> None:
    both = record(1, 0.5, metrics={"accuracy": 1.0, "loss": 0.1})
    assert (both.value("accuracy"), both.value("loss"), both.value("other")) == (0.5, 0.1, None)


def test_patience_counts_rounds_since_the_best() -> None:
    rising, falling = Until.parse("accuracy >= 2"), Until.parse("accuracy <= -2")
    assert Ending(None, rising, 2).reason(history(0.1, 0.4, 0.3)) == ""
    told = "accuracy has not improved for 2 rounds: 0.4 in round 2"
    assert Ending(None, rising, 2).reason(history(0.1, 0.4, 0.3, 0.4)) == told
    assert Ending(None, rising, 2).reason(history(0.1, 0.4, 0.3, 0.5)) == ""
    assert Ending(None, falling, 2).reason(history(0.1, 0.4, 0.3)) != ""
    assert Ending(None, rising, 2).reason(history(None, None, None, 0.1)) == ""


def test_histories_are_equal_if_what_all_agree_on_is() -> None:
    mine, theirs = history(0.1, 0.2), history(0.1, 0.2)
    theirs.add(record(2, 0.2, seconds=3.0, late=1.0, reason="slow", bytes_sent=9, drawn=("a",)))
    assert mine == theirs
    assert mine != history(0.1, 0.3)
    assert mine != history(0.1)
    assert [one.number for one in theirs] == [1, 2]


def test_a_history_is_written_as_json_lines(tmp_path: Path) -> None:
    whole = History([record(1, 0.5, drawn=("a", "b"), seconds=1.5), record(2)])
    path = tmp_path / "history.jsonl"
    whole.write(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2]
    assert lines[0]["contributors"] == {"b": 2.0, "a": 1.0}
    assert msgspec.convert(lines, list[Record]) == list(whole)


def test_a_history_travels_with_the_state_and_keeps_what_is_the_peers_own() -> None:
    theirs, mine = history(0.1, 0.2, 0.3), History([record(1, 0.1, seconds=3.0), record(2, 0.9, seconds=4.0)])
    mine.check(theirs.tree(), foreign=True)
    mine.load(theirs.tree())
    assert mine == theirs
    assert [one.seconds for one in mine] == [3.0, 0.0, 0.0]
    assert torch.equal(mine.tree()["records"], theirs.tree()["records"])


def long_history(rounds: int, value: float = 0.5) -> History:
    return History([record(number, value, seconds=1.0) for number in range(1, rounds + 1)])


def test_a_snapshot_has_the_last_rounds_and_a_peer_that_saw_them_has_all(tmp_path: Path) -> None:
    rounds = REPLICATED_ROUNDS + 5
    veteran, newcomer = long_history(rounds), History()
    newcomer.load(veteran.tree())
    assert [one.number for one in newcomer] == list(range(6, rounds + 1))
    for one in (veteran, newcomer):
        one.add(record(rounds + 1, 0.75))
        one.add(record(rounds + 1, 0.75, seconds=2.0))
    assert torch.equal(newcomer.tree()["records"], veteran.tree()["records"])
    assert [one.number for one in newcomer] == list(range(6, rounds + 2))
    assert newcomer[-1:] == [record(rounds + 1, 0.75, seconds=2.0)]
    veteran.load(newcomer.tree())
    assert [one.seconds for one in veteran] == [1.0] * rounds + [2.0]
    veteran.write(tmp_path / "history.jsonl")
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == rounds + 1


@pytest.mark.parametrize("rounds", [0, 5, REPLICATED_ROUNDS + 7])
def test_the_rounds_of_another_history_do_not_stay(rounds: int) -> None:
    own, other = long_history(rounds, 0.25), long_history(REPLICATED_ROUNDS + 5)
    own.load(other.tree())
    assert [one.number for one in own] == list(range(6, REPLICATED_ROUNDS + 6))
    assert {one.evaluation["accuracy"] for one in own} == {0.5}


def test_the_longest_history_of_the_largest_group_leaves_room_in_an_image() -> None:
    names = {f"{at:064}": 1 / 3 for at in range(64)}
    metrics = {f"{at:024}": 1 / 3 for at in range(8)}
    largest = [
        Record(
            number=at,
            contributors=names,
            metrics=metrics,
            evaluation=metrics,
            digest=DIGEST,
            medians={name: (value, value) for name, value in metrics.items()},
        )
        for at in range(1, REPLICATED_ROUNDS + 2)
    ]
    size = History(largest).tree()["records"].numel()
    assert size <= 6000 * REPLICATED_ROUNDS <= SPARE_BYTES / 10


def test_all_peers_end_alike_however_many_rounds_they_have() -> None:
    until = Until.parse("accuracy >= 0.9")
    for best, patience, ends in ((1, 999, True), (600, 450, True), (600, 451, False), (5, 0, False)):
        whole, newcomer = long_history(1050), History()
        whole.add(record(best, 0.75))
        newcomer.load(whole.tree())
        told = Ending(None, until, patience).reason(whole)
        assert told == Ending(None, until, patience).reason(newcomer)
        assert bool(told) == ends


@pytest.mark.parametrize(
    "rows",
    [
        [[2, {}, {}, {}, DIGEST]],
        [[1, {}, {}, {}, DIGEST], [3, {}, {}, {}, DIGEST]],
        [[1, {}, {}, {}, "short"]],
        [[1, {}, {"x" * 25: 1.0}, {}, DIGEST]],
        [[1, {}, {"loss": float("nan")}, {}, DIGEST]],
        [[1, {"": 1.0}, {}, {}, DIGEST]],
        [[0, {}, {}, {}, DIGEST]],
        "text",
    ],
)
def test_a_foreign_history_is_checked(rows: Any) -> None:
    bytes_ = torch.frombuffer(bytearray(msgspec.msgpack.encode(rows)), dtype=torch.uint8)
    with pytest.raises(ImageError, match="expected a history's records"):
        History().check({"records": bytes_})


@pytest.mark.parametrize("tree", [None, {}, {"records": 3}, {"records": torch.zeros(2)}])
def test_what_is_no_history_is_refused(tree: Any) -> None:
    with pytest.raises(ImageError, match="expected a history's records as bytes"):
        History().check(tree)


def test_a_record_follows_from_an_outcome() -> None:
    outcome = Outcome(
        ok=True,
        reason="all contributed",
        contributors={"a": 3.0, "idle": 2.0**-30},
        metrics={"loss": 0.5},
        evaluation={"accuracy": 0.25},
        digest=DIGEST,
        bytes_sent=7,
    )
    made = Record.of(4, outcome)
    assert (made.number, made.ok, made.contributors, made.bytes_sent) == (4, True, {"a": 3.0}, 7)
    assert (made.metrics, made.evaluation, made.digest) == ({"loss": 0.5}, {"accuracy": 0.25}, DIGEST)
    assert made
