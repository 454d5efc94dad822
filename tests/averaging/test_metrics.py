"""Reported numbers: what a script may give, and their averages over a group."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.aio.round_driver import group_of, mean_outcome, metrics_of
from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.metrics import MAX_AVERAGES, Report, averaged, report_of, values_of
from equipoise.averaging.options import RunOptions
from equipoise.averaging.replication.update import EncodedMean
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from fakes.memory import FakeIdentity

SPEC = RunSpec.create("digits", Schema.of({"w": torch.zeros(3)}))
WEIGHTS = st.floats(1e-3, 1e12)
NUMBERS = st.floats(-1e3, 1e3).map(lambda value: value if abs(value) > 1e-300 else 0.0)
"""Products of weights and the smallest numbers underflow in the reference, which adds in float64."""


@given(st.lists(st.tuples(WEIGHTS, NUMBERS), min_size=1, max_size=64))
def test_the_mean_is_exact(rows: list[tuple[float, float]]) -> None:
    expected = math.fsum(w * v for w, v in rows) / math.fsum(w for w, _ in rows)
    got = averaged([(weight, {"loss": value}) for weight, value in rows], robust=False)
    assert got["loss"] == pytest.approx(expected, rel=1e-12, abs=1e-12 * max(abs(v) for _, v in rows))


@given(st.permutations([(1.0, 0.1), (2.0, 0.2), (3.0, 1e-17), (1e12, -5.0), (0.5, 1e300)]))
def test_the_mean_does_not_depend_on_the_order(rows: list[tuple[float, float]]) -> None:
    reports = [(weight, {"loss": value}) for weight, value in rows]
    assert averaged(reports, False) == averaged(sorted(reports), False)


def test_the_largest_numbers_do_not_overflow() -> None:
    largest = sys.float_info.max
    reports = [(weight, {"loss": largest}) for weight in (1e12, 0.1, 3.0, 7.0)]
    assert averaged(reports, False) == averaged(reports, True) == {"loss": largest}


def test_where_the_rule_is_robust_it_is_the_median_whatever_the_weights() -> None:
    reports = [(weight, {"loss": value}) for weight, value in ((1.0, 1.0), (9.0, 2.0), (1.0, 50.0))]
    assert averaged(reports, True) == {"loss": 2.0}
    assert averaged([*reports, (1.0, {"loss": 3.0})], True) == {"loss": 2.5}


def test_a_name_that_some_report_is_averaged_over_those_and_weight_0_does_not_count() -> None:
    reports = [(1.0, {"a": 1.0}), (3.0, {"a": 5.0, "b": 7.0}), (0.0, {"a": 9.0, "c": 1.0})]
    assert averaged(reports, False) == {"a": 4.0, "b": 7.0}
    assert averaged([], False) == {}


def test_names_of_one_member_cannot_push_out_those_of_most() -> None:
    honest = [(1.0, {"loss": 1.0, "zeal": 2.0})] * 2
    flood = [(1.0, {f"a{member}{index}": 0.0 for index in range(8)}) for member in range(8)]
    got = averaged([*flood, *honest], False)
    assert len(got) == MAX_AVERAGES
    assert (got["loss"], got["zeal"]) == (1.0, 2.0)


def test_numbers_of_any_kind_become_floats_sorted_by_name() -> None:
    given = {"loss": torch.tensor(0.5), "accuracy": np.float32(0.25), "count": 3}
    assert values_of(given) == {"accuracy": 0.25, "count": 3.0, "loss": 0.5}
    assert report_of((2, {"f 1": 1})) == Report(2.0, {"f 1": 1.0})


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"loss": math.nan}, "metric 'loss' as a finite number, got nan"),
        ({"loss": -math.inf}, "metric 'loss' as a finite number, got -inf"),
        ({"loss": 10**400}, "metric 'loss' as a finite number, got 1000"),
        ({"loss": "0.5"}, "metric 'loss' as a finite number, got '0.5'"),
        ({"loss": None}, "metric 'loss' as a finite number, got None"),
        ({"loss": torch.zeros(2)}, r"metric 'loss' as a finite number, got tensor"),
        ({"": 1.0}, "name of 1 to 24 characters of printable ASCII, got ''"),
        ({"l" * 25: 1.0}, "name of 1 to 24"),
        ({"lo\nss": 1.0}, "name of 1 to 24"),
        ({7: 1.0}, "name of 1 to 24 characters of printable ASCII, got '7'"),
        ({str(index): 1.0 for index in range(9)}, "at most 8 numbers by name, got 9"),
        (["loss"], r"at most 8 numbers by name, got \['loss'\]"),
    ],
)
def test_an_invalid_metric_is_named(metrics: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        values_of(metrics)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("evaluation", [(math.nan, {}), (-1, {}), (2e12, {}), (True, {}), ("1", {}), 7, {}])
def test_an_evaluation_that_is_not_valid_is_refused(evaluation: Any) -> None:
    with pytest.raises(ValueError, match=r"expected (the weight of metrics|an evaluation)"):
        report_of(evaluation)


def manifest_of(**members: dict[str, Any]) -> Manifest:
    joins = []
    for peer, fields in members.items():
        stated = {"weight": 1.0, **fields}
        weight, state = stated.pop("weight"), stated.pop("state", None)
        one = Join(peer, SPEC.hash, 0, weight, 0.0, True, bytes(16), b"", state, b"", **stated)
        joins.append(one.signed(FakeIdentity(peer).sign))
    return Manifest.of("a", joins)


def score(weight: float, value: float) -> Report:
    return Report(weight, {"accuracy": value})


def test_only_contributors_that_counted_are_in_the_metrics() -> None:
    loss = [{"loss": float(index)} for index in range(4)]
    group = manifest_of(
        a={"fit": loss[0]},
        b={"fit": loss[1]},
        lost={"fit": loss[2], "evaluation": score(1.0, 9.0)},
        z={"fit": loss[3], "weight": ATTENDANCE_LIMIT, "evaluation": score(1.0, 3.0)},
    )
    counted = {"a": 1.0, "b": 3.0, "z": ATTENDANCE_LIMIT}
    assert metrics_of(SPEC, group, counted)[:2] == ({"loss": 0.75}, {"accuracy": 3.0})


def test_observers_are_in_the_evaluation_of_which_one_weight_is_capped() -> None:
    group = manifest_of(
        a={"evaluation": score(1.0, 0.0)},
        b={"evaluation": score(1.0, 0.0)},
        observer={"weight": 0.0, "evaluation": score(1e12, 1.2)},
        silent={},
    )
    counted = dict.fromkeys(("a", "b", "silent"), 1.0)
    metrics, evaluation, _ = metrics_of(SPEC, group, counted)
    assert (metrics, evaluation) == ({}, {"accuracy": pytest.approx(1.0, rel=1e-12)})


def test_the_evaluation_of_another_state_does_not_count() -> None:
    held, other = StateId(7, "a" * 64), StateId(6, "b" * 64)
    group = manifest_of(
        a={"state": held, "evaluation": score(1.0, 1.0)},
        b={"state": held, "evaluation": score(1.0, 3.0)},
        astray={"state": other, "evaluation": score(1.0, 50.0)},
        silent={"evaluation": score(1.0, 70.0)},
    )
    assert metrics_of(SPEC, group, dict.fromkeys(group.peers, 1.0))[:2] == ({}, {"accuracy": 2.0})


def test_a_peer_too_light_to_contribute_to_a_federated_round_counts_as_an_observer() -> None:
    options = RunOptions(strategy="federated")
    spec = RunSpec.create("digits", SPEC.schema, options)
    light = {"weight": ATTENDANCE_LIMIT, "evaluation": score(1.0, 3.0), "fit": {"loss": 9.0}}
    group = manifest_of(a={"fit": {"loss": 1.0}}, b={"evaluation": score(2.0, 0.0)}, z=light)
    assert metrics_of(spec, group, {"a": 1.0, "b": 1.0})[:2] == ({"loss": 1.0}, {"accuracy": 1.0})


def test_where_the_rule_is_not_the_mean_both_are_medians() -> None:
    spec = RunSpec.create("digits", SPEC.schema, RunOptions(rule="median"))
    group = manifest_of(
        **{
            peer: {"fit": {"loss": value}, "evaluation": score(weight, value)}
            for peer, weight, value in (("a", 1.0, 1.0), ("b", 100.0, 2.0), ("c", 1.0, 50.0))
        }
    )
    counted = {"a": 1.0, "b": 100.0, "c": 1.0}
    assert metrics_of(spec, group, counted)[:2] == ({"loss": 2.0}, {"accuracy": 2.0})
    assert metrics_of(SPEC, group, counted)[0] == {"loss": 251 / 102}


def test_members_that_only_attend_are_reported_one_by_one() -> None:
    light, scores = {"weight": ATTENDANCE_LIMIT, "fit": {"lr": 0.1}}, Report(0.0, {"score": 3.0})
    group = manifest_of(a={"fit": {"loss": 1.0}}, b={**light, "evaluation": scores}, lost=light, y=light)
    contributors = sum(1 << group.peers.index(peer) for peer in ("a", "b", "y"))
    mean = EncodedMean(group, contributors, ())
    outcome = mean_outcome(SPEC, group_of(SPEC, group), mean, bytes(32))
    assert outcome.reports == {"b": ({"lr": 0.1}, {"score": 3.0}), "y": ({"lr": 0.1}, {})}
    assert (outcome.metrics, outcome.evaluation) == ({"loss": 1.0}, {}), "in no average"
