"""Sketches: nearly equal contributions are near, whatever the codec, and others are not."""

from __future__ import annotations

import pytest
import torch

from equipoise.averaging.layout import Layout
from equipoise.averaging.manifest import are_near
from equipoise.averaging.schema import Schema
from equipoise.averaging.sketch import sketch
from equipoise.compression import Codec, parse_codec
from fakes.vectors import encoded
from oracles.training import Batch, batch_of, loss_of, network

CODECS = [parse_codec(spec) for spec in ("fp32", "fp16", "int8", "int8:block=4096", "nf4", "sparse")]


def noise(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("values", [100, 700, 200_000])
def test_contributions_that_rounding_sets_apart_are_near(codec: Codec, values: int) -> None:
    small = {"bias": torch.zeros(10), "statistics": torch.zeros(40)}
    layout = Layout(Schema.of({"w": torch.zeros(values), **small}), codec)
    scale = torch.linspace(1e-3, 1e3, layout.size)
    one = noise(layout.size, 1) * scale
    given = sketch(layout, encoded(layout, one))
    assert are_near(given, sketch(layout, encoded(layout, one.clone())))
    rounded = one * (1 + 1e-5 * noise(layout.size, 2))
    assert are_near(given, sketch(layout, encoded(layout, rounded)))
    assert are_near(given, sketch(layout, encoded(layout, one * 8.0))), "the norm is compared beside it"
    other = one + 0.3 * noise(layout.size, 3) * scale
    assert not are_near(given, sketch(layout, encoded(layout, other)))
    assert not are_near(given, sketch(layout, encoded(layout, -one)))


def test_a_large_value_that_others_share_makes_nobody_near() -> None:
    layout = Layout(Schema.of({"w": torch.zeros(65)}), parse_codec("fp32"))
    first, second = (noise(65, seed).index_fill(0, torch.tensor([64]), 1e4) for seed in (1, 2))
    assert not are_near(*(sketch(layout, encoded(layout, one)) for one in (first, second)))


def test_what_says_too_little_has_no_sketch_and_is_near_nothing() -> None:
    layout = Layout(Schema.of({"w": torch.zeros(5000)}), parse_codec("fp32"))
    few = torch.zeros(5000).index_fill(0, torch.arange(20), 1.0)
    for values in (torch.zeros(5000), few, torch.full((5000,), torch.nan)):
        assert sketch(layout, encoded(layout, values)) == b""
    assert not are_near(b"", b"")


@pytest.mark.parametrize(("samples", "rounds"), [(512, 30), pytest.param(4, 1000, marks=pytest.mark.slow)])
def test_other_data_are_near_in_no_round_and_the_same_in_another_order_in_each(
    samples: int, rounds: int
) -> None:
    model = network(64)
    layout = Layout(Schema.of(dict(model.named_parameters())), parse_codec("int8"))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def gradient(batch: Batch) -> bytes:
        adamw.zero_grad()
        loss_of(model, batch).backward()
        flat = torch.zeros(layout.size)
        for spec, start, stop in layout.places:
            gradient = model.get_parameter(spec.name).grad
            assert gradient is not None
            flat[start:stop] = gradient.flatten()
        return sketch(layout, encoded(layout, flat))

    for at in range(rounds):
        batch = batch_of(0, at, samples)
        other = gradient(batch_of(1, at, samples))
        turned = gradient(Batch(*(one.flip(0) for one in batch)))
        given = gradient(batch)
        assert are_near(given, turned)
        assert not are_near(given, other)
        adamw.step()
