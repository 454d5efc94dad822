"""A plan beside sums by hand, and the verdict on rounds that took what they took."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.averaging.advice import LINK_SHARE, judge, plan
from equipoise.averaging.aio.run_driver import RunDriver
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec

HOME = {"upload": 20e6 / 8, "download": 100e6 / 8, "step": 1.2}


def rounds(exchange: float, period: float, count: int = 5) -> list[Outcome]:
    """So many rounds of four peers, one every `period` seconds."""
    seconds = {"exchange": exchange, "total": exchange}
    return [
        Outcome(ok=True, reason="ok", group=("a", "b", "c", "d"), seconds=seconds, started=index * period)
        for index in range(count)
    ]


def test_an_exchange_takes_what_its_bytes_need_on_the_slower_direction() -> None:
    (one,) = plan(8_000_000, 8, **HOME, codecs=["fp32"], every=100)
    moved = 2 * 4 * 8_000_000 * 7 // 8
    assert (one.codec, one.sent, one.received, one.problem) == ("fp32", moved, moved, "")
    assert one.seconds == pytest.approx(moved / (LINK_SHARE * 20e6 / 8))
    assert one.share == pytest.approx(one.seconds / (one.seconds + 120))
    assert one.every == math.ceil(19 * one.seconds / 1.2)


def test_codecs_are_compared_in_order_and_say_what_does_not_fit() -> None:
    found = plan(1_000_000_000, 8, **HOME, memory=10e9)
    assert [one.codec.partition(":")[0] for one in found] == ["fp32", "fp16", "int8", "nf4", "sparse"]
    assert [one.seconds for one in found] == sorted((one.seconds for one in found), reverse=True)
    assert found[0].problem == "a peer needs 20.0 GB beside its model and optimizer; 10.0 GB are free here"
    assert found[3].problem == ""
    (crowd,) = plan(1_000, 65, **HOME, codecs=["int8"])
    assert crowd.problem == "a group holds at most 64 peers"
    (sparse,) = plan(1 << 20, 16, **HOME, codecs=["sparse:group=64"])
    contribution = 2 * (1 << 20) // 512 + (1 << 20) // 64
    assert sparse.sent == 17 * contribution * 15 // 16, "a mean is all contributions"
    assert plan(1_000, 33, **HOME, codecs=["sparse"])[0].problem == "a group holds at most 32 peers"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parameters": 0}, "parameters above 0, got 0"),
        ({"peers": 1}, "at least 2 peers, got 1"),
        ({"step": math.nan}, "step above 0, got nan"),
        ({"upload": math.inf}, "upload above 0, got inf"),
        ({"every": 0}, "every above 0, got 0"),
        ({"codecs": ["int9"]}, "unknown codec 'int9'"),
    ],
)
def test_numbers_out_of_their_range_are_named(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(**({"parameters": 1, "peers": 2, **HOME} | changed))  # type: ignore[arg-type]


def test_rounds_that_take_a_third_of_the_time_get_a_better_setting() -> None:
    line = judge(rounds(exchange=5.0, period=15.0), 1 << 23, "fp32", 100e6 / 8, 0.0)
    assert line == (
        "exchanges take 33% of the time, 5 s each; the links need 4.5 s; "
        'codec="nf4:block=64" needs 0.59 s; 10 times as many steps between exchanges make that 5 %'
    )


def test_a_run_is_judged_by_its_last_rounds_and_the_measured_links() -> None:
    spec = RunSpec.create("run", Schema.of({"w": torch.zeros(1 << 16)}), RunOptions(codec="fp32"))
    links, last = SimpleNamespace(told=1e5), SimpleNamespace(last=rounds(exchange=5.0, period=15.0))
    run: Any = SimpleNamespace(
        spec=spec, counts=last, _sessions=SimpleNamespace(meter=SimpleNamespace(upload=links, download=links))
    )
    line = RunDriver.advice.fget(run)  # type: ignore[attr-defined]
    assert line.startswith("exchanges take 33% of the time, 5 s each; the links need 4.4 s; codec=")


@pytest.mark.parametrize(
    ("count", "period", "upload"),
    [(2, 15.0, 1e6), (5, 200.0, 1e6), (5, 15.0, 0.0)],
    ids=["too few", "mostly computing", "link unknown"],
)
def test_nothing_is_said_of_rounds_that_need_no_better_setting(
    count: int, period: float, upload: float
) -> None:
    assert judge(rounds(5.0, period, count), 1 << 23, "int8", upload, 0.0) == ""
