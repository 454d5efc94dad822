"""The norms that contributors sign: they cap what one of them can do to a mean."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.weights import ATTENDANCE_LIMIT, shrinkage
from equipoise.compression import CodecError, kernels, parse_codec
from fakes.cluster import Cluster, company
from fakes.specs import spec
from fakes.vectors import averaged

HUGE = 3.3e38
HONEST = [torch.randn(5000, generator=torch.Generator().manual_seed(at)) for at in range(3)]


async def round_of(
    cluster: Cluster, values: list[torch.Tensor], timeout: float = 20.0, lies: float = 0.0, **options: object
) -> tuple[list[Outcome], list[torch.Tensor]]:
    """One round of a, b, ... with these values; the last may lie about its norm."""
    run_spec = spec({"w": (5000,)}, part_values=256, **options)
    runs = [await cluster.host(name).join(run_spec) for name in "abcd"[: len(values)]]
    await company(runs)
    results = [torch.zeros(5000) for _ in runs]
    said = [0.0] * (len(runs) - 1) + [lies]
    each = zip(runs, values, results, said, strict=True)
    work = (averaged(run, one, got, 1.0, timeout, lie=lie) for run, one, got, lie in each)
    return await asyncio.gather(*work), results


@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_a_norm_counts_as_ten_lower_medians_at_most(size: int) -> None:
    norms, weights = [*[2.0] * (size - 1), HUGE], [1.0] * size
    assert shrinkage(weights, norms, -1, 10.0) == (*[1.0] * (size - 1), 20.0 / HUGE)
    assert shrinkage(weights, [1.0] * (size - 1) + [10.0], -1, 10.0) == (1.0,) * size
    assert shrinkage(weights, norms, -1, math.inf) == (1.0,) * size


def test_norms_of_nothing_and_of_nobody_are_in_no_median() -> None:
    assert shrinkage((1.0, 1.0, 1.0), (0.0, 3.0, 40.0), -1, 10.0) == (1.0, 1.0, 0.75)
    assert shrinkage((1.0, 1.0), (2.0, math.inf), -1, 10.0) == (1.0, 0.0), "unsaid"
    assert shrinkage((1.0, ATTENDANCE_LIMIT), (2.0, 80.0), -1, 10.0) == (1.0, 0.25), "it attends"
    assert shrinkage((1.0, 1.0), (math.inf, math.inf), -1, 10.0) == (1.0, 1.0), "as in older manifests"
    assert shrinkage((1.0, 1.0, 9.0), (1.0, 1.0, math.nan), -1, 10.0)[2] != 1.0


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int8:block=32", "nf4", "sparse"])
@pytest.mark.parametrize("count", [1, 130, 100_000])
def test_squares_are_those_of_the_decoded_values(codec: str, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 9.0, count)
    form = parse_codec(codec)
    payload, found = memoryview(bytearray(form.encoded_size(count))), torch.empty(count)
    form.encode(values, payload)
    form.decode(payload, found)
    assert form.squares(payload, count) == pytest.approx(float(found.double().square().sum()), rel=1e-3)
    form.encode(torch.zeros(count), payload)
    assert form.squares(payload, count) == 0.0


def test_what_no_encoder_writes_has_no_squares_or_as_many_below_zero() -> None:
    form, count = parse_codec("int8"), 1 << 17
    payload = memoryview(bytearray(form.encoded_size(count)))
    form.encode(torch.ones(count), payload)
    payload[4] = 0x80
    if kernels().arrays is None:
        with pytest.raises(CodecError, match="is -128"):
            form.squares(payload, count)
    else:
        assert form.squares(payload, count) == pytest.approx(-count, rel=1e-3)


@pytest.mark.parametrize(("codec", "flat"), [("fp32", HUGE), ("fp32", 1e15), ("int8", 1e30)])
async def test_huge_values_move_the_mean_of_four_by_the_cap_at_most(
    cluster: Cluster, codec: str, flat: float
) -> None:
    outcomes, results = await round_of(cluster, [*HONEST, torch.full((5000,), flat)], codec=codec)
    assert all(outcomes), outcomes
    moved = float((results[0] - sum(HONEST) / 4).double().norm())
    cap = 10 * float(sorted(one.norm() for one in HONEST)[0])
    assert moved < 1.2 * cap / 4
    assert moved > 0.8 * cap / 4 or flat == HUGE, "whose factor is below the least share"
    assert set(outcomes[0].shrunk) == {"d"}
    assert "; the values of ..d count times " in outcomes[0].reason
    assert len({outcome.digest for outcome in outcomes}) == 1


async def test_any_norm_counts_where_the_run_says_so(cluster: Cluster) -> None:
    outcomes, results = await round_of(cluster, [*HONEST, torch.full((5000,), 1e15)], norms="any")
    assert not outcomes[0].shrunk
    torch.testing.assert_close(results[0], torch.full((5000,), 2.5e14))


async def test_a_contribution_of_more_than_its_signed_norm_is_not_in_the_mean(cluster: Cluster) -> None:
    outcomes, results = await round_of(cluster, [*HONEST, torch.full((5000,), HUGE)], lies=70.0)
    assert all(outcomes[:3]), outcomes
    assert set(outcomes[0].contributors) == {"a", "b", "c"}
    assert outcomes[0].left_out == ("d",)
    assert outcomes[0].reason.startswith("mean over 3 of 4 members; without ..d")
    assert any("d left out by the word of " in one for one in outcomes[0].events)
    assert any("d lost" in one and "norm of 70 in all, as it signed" in one for one in outcomes[0].events)
    torch.testing.assert_close(results[0], sum(HONEST) / 3, rtol=1e-4, atol=1e-5)


async def test_a_pair_of_gossip_far_apart_makes_no_exchange(cluster: Cluster) -> None:
    values = [torch.ones(5000), torch.full((5000,), HUGE)]
    outcomes, results = await round_of(cluster, values, 1.0, strategy="gossip")
    assert not any(outcomes)
    assert not any(bool(result.any()) for result in results)
