"""The numbers that training scripts report with their joins, and their averages over a group.

A script reports metrics of its training (`fit`) and the scores of the group's state on its data (`evaluation`). Both
travel in the signed join, so every member averages the same numbers, and so does a peer that fetches the mean later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from fractions import Fraction
from statistics import median, median_high, median_low
from typing import Annotated

import msgspec

from equipoise.averaging.weights import MAX_WEIGHT, Weight

MAX_METRICS = 8
"""Most numbers of one report: two reports of a member take 600 bytes of a manifest, which must fit into one header."""

MAX_NAME_CHARS = 24
"""Longest name of a number, for the same reason."""

MAX_AVERAGES = 16
"""Most numbers of a group's average: members may report different names, and an outcome must stay small."""

LARGEST = sys.float_info.max

Name = Annotated[str, msgspec.Meta(pattern=rf"\A[ -~]{{1,{MAX_NAME_CHARS}}}\Z")]
Finite = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Values = Annotated[dict[Name, Finite], msgspec.Meta(max_length=MAX_METRICS)]
"""Numbers by name."""

Evaluation = tuple[float, Mapping[str, float]]
"""A weight, and numbers by name, as a script gives them."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """Numbers with a weight of their own.

    Attributes:
        weight: How much they count, usually in samples; 0 does not count.
        values: Finite numbers by names of 1 to 24 characters of printable ASCII.
    """

    weight: Weight
    values: Values


def values_of(metrics: Mapping[str, float]) -> Values:
    """Bring a script's numbers into the form in which they travel.

    Args:
        metrics: At most 8 finite numbers by their names, of 1 to 24 characters of printable ASCII.

    Raises:
        ValueError: There are too many, or a name or number is not valid; names it.
    """
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        got = f"{len(metrics)} of them" if isinstance(metrics, Mapping) else repr(metrics)[:80]
        raise ValueError(f"expected metrics as at most {MAX_METRICS} numbers by name, got {got}")
    for name in metrics:
        if not _is_valid(name, Name):
            raise ValueError(
                f"expected a metric's name of 1 to {MAX_NAME_CHARS} characters of printable ASCII, "
                f"got {str(name)[:80]!r}"
            )
    return {name: _finite(name, metrics[name]) for name in sorted(metrics)}


def report_of(evaluation: Evaluation) -> Report:
    """Bring a script's numbers and their weight into the form in which they travel.

    Raises:
        ValueError: It is no such pair, or the weight, a name or a number is not valid; names it.
    """
    if not isinstance(evaluation, tuple) or len(evaluation) != 2:
        raise ValueError(f"expected an evaluation as (weight, {{name: number}}), got {repr(evaluation)[:80]}")
    weight, metrics = evaluation
    counted = _number(weight)
    if isinstance(weight, bool) or not _is_valid(counted, Weight):
        got = repr(weight)[:80]
        raise ValueError(f"expected the weight of metrics as a number of 0 to {MAX_WEIGHT:g}, got {got}")
    return Report(counted, values_of(metrics))


def averaged(reports: Iterable[tuple[float, Values]], robust: bool) -> dict[str, float]:
    """Return the average of each name over the reports that have it, computed exactly and rounded once.

    Args:
        reports: Pairs of a weight and of numbers; those of weight 0 do not count.
        robust: Whether to take the median of the counting reports in place of the weighted mean; of an even number of
            reports it is the mean of the middle two.

    Returns:
        By name; of more than 16 names, those that most reports have.
    """
    return {name: float(_average(rows, robust)) for name, rows in _counting(reports).items()}


def middles(reports: Iterable[tuple[float, Values]]) -> dict[str, tuple[float, float]]:
    """Return the lower and the upper median of each name over the reports of weights above 0, at most 16 names.

    Every report counts alike: neither a claimed weight nor a claimed number moves them past most of the others.
    """
    values = {name: [float(value) for _, value in rows] for name, rows in _counting(reports).items()}
    return {name: (median_low(each), median_high(each)) for name, each in values.items()}


def _counting(reports: Iterable[tuple[float, Values]]) -> dict[str, list[tuple[Fraction, Fraction]]]:
    found: dict[str, list[tuple[Fraction, Fraction]]] = {}
    for weight, values in reports:
        for name, value in values.items() if weight > 0 else ():
            found.setdefault(name, []).append((Fraction(weight), Fraction(value)))
    names = sorted(found, key=lambda name: (-len(found[name]), name))[:MAX_AVERAGES]
    return {name: found[name] for name in sorted(names)}


def _average(rows: list[tuple[Fraction, Fraction]], robust: bool) -> Fraction:
    if robust:
        return median(value for _, value in rows)
    total = sum((weight for weight, _ in rows), Fraction())
    return sum((weight * value for weight, value in rows), Fraction()) / total


def _number(value: object) -> float:
    """A number, also one of numpy or a tensor of one value, as a float; NaN for anything else."""
    try:
        return float("nan") if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several values.
        return float("nan")


def _finite(name: str, value: object) -> float:
    number = _number(value)
    if not _is_valid(number, Finite):
        raise ValueError(f"expected metric {name!r} as a finite number, got {repr(value)[:80]}")
    return number


def _is_valid(value: object, kind: object) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True
