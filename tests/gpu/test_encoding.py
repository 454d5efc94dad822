"""Tensors on CUDA devices to the encoded vector and back: the bytes and values of a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from equipoise.averaging.layout import Layout
from equipoise.averaging.schema import Schema, SchemaError
from equipoise.compression import kernels, parse_codec
from equipoise.compression.choice import ENVIRONMENT, INTERPRETER
from equipoise.peer.client import message_content
from equipoise.peer.client.accumulate import Accumulator
from equipoise.peer.client.encoding import LANE_VALUES, LARGE_VALUES, Encoder
from equipoise.peer.client.lanes import DeviceLane, pin
from equipoise.peer.client.tensors import Binding
from equipoise.peer.shared_memory import Region

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPECS = ["fp32", "fp16", "bf16", "int8", "int8:block=4096", "nf4", "sparse:group=64", "sparse:group=32"]
DEVICES = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cuda:0"]


@pytest.fixture(params=["torch", "triton"], autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each choice of kernels in turn."""
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.delenv(INTERPRETER, raising=False)
    monkeypatch.setenv(ENVIRONMENT, request.param)
    kernels.cache_clear()
    yield
    kernels.cache_clear()


def values_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def tensors() -> dict[str, torch.Tensor]:
    return {
        "large": values_of(LANE_VALUES + 4096 + 77),
        "tiny": values_of(3, 1),
        "half": values_of(LARGE_VALUES + 4096, 2).half(),
        "strided": values_of(800 * 1000, 4).reshape(800, 1000).t(),
        "small strided": values_of(600, 5).reshape(20, 30).t(),
        "double": values_of(300, 6).double(),
        "negated": torch._neg_view(values_of(700, 7)),
        "scalar": torch.tensor(2.5),
        "small": values_of(40 * 1024, 8),
    }


def moved(named: dict[str, torch.Tensor], devices: list[str]) -> dict[str, torch.Tensor]:
    """The tensors with their strides, on the devices in turn."""

    def there(tensor: torch.Tensor, device: str) -> torch.Tensor:
        # A copy to another device would resolve the negation.
        return torch._neg_view(torch._neg_view(tensor).to(device)) if tensor.is_neg() else tensor.to(device)

    return {name: there(one, devices[at % len(devices)]) for at, (name, one) in enumerate(named.items())}


def stored_by(
    layout: Layout, named: dict[str, torch.Tensor], out: memoryview | None = None, divisor: float = 1.0
) -> bytes:
    out = memoryview(bytearray(layout.encoded_size)) if out is None else out
    Encoder(layout).encode(named, out, divisor)
    return bytes(out)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("devices", [DEVICES[:1], [*DEVICES, "cpu"]], ids=["one device", "all"])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_same_as_on_a_cpu(spec: str, devices: list[str], inference: bool, pinned: bool) -> None:
    named = tensors()
    layout = Layout(Schema.of(named, {"tiny", "scalar"}), parse_codec(spec))
    region = Region.create(layout.encoded_size)
    region.memory.close()
    if pinned:
        pin(region, {torch.device(DEVICES[0])})
    assert torch.frombuffer(region.mean, dtype=torch.uint8).is_pinned() == pinned
    back = {name: torch.empty_like(one) for name, one in moved(named, devices).items()}
    theirs = {name: torch.empty_like(one) for name, one in named.items()}
    expected = stored_by(layout, named, divisor=3.7)
    encoder = Encoder(layout)
    for current in DEVICES:
        with torch.cuda.device(current), torch.inference_mode(inference):
            assert stored_by(layout, moved(named, devices), region.contribution, 3.7) == expected
            region.mean[:] = region.contribution
            encoder.decode(region.mean, back)
            encoder.settle()
            region.mean[:] = bytes(len(region.mean))
    Encoder(layout).decode(region.contribution, theirs)
    assert all(torch.equal(back[name].cpu(), theirs[name]) for name in named)


@pytest.mark.parametrize("spec", SPECS)
def test_the_norm_is_that_of_a_cpu(spec: str) -> None:
    """A GPU's sum has another order: the owner's check gives that much leeway."""
    layout = Layout(Schema.of(tensors()), parse_codec(spec))
    out = memoryview(bytearray(layout.encoded_size))
    norms = [Encoder(layout).encode(named, out).norm for named in (tensors(), moved(tensors(), DEVICES))]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("spec", ["raw", "int8", "nf4", "bf16"])
def test_a_message_holds_the_bytes_of_a_cpu(spec: str) -> None:
    named = tensors()
    contents = [
        message_content.encode(one, {"step": 1}, spec, lambda size: torch.empty(size, dtype=torch.uint8))
        for one in (named, moved(named, DEVICES))
    ]
    assert contents[0].equal(contents[1])


@pytest.mark.parametrize("spec", ["fp32", "int8"])
def test_a_value_that_is_not_finite_is_named(spec: str) -> None:
    named = moved(tensors(), DEVICES)
    named["half"][70] = torch.inf
    with pytest.raises(SchemaError, match="tensor 'half' holds inf at flat index 70: "):
        stored_by(Layout(Schema.of(named), parse_codec(spec)), named)


def test_encoding_waits_for_the_current_stream_and_ends_before_it_returns() -> None:
    named = {"w": values_of(4_000_000)}
    layout = Layout(Schema.of(named), parse_codec("int8"))
    expected, there = stored_by(layout, named), {"w": torch.zeros(4_000_000, device="cuda")}
    source = named["w"].cuda()
    region = Region.create(layout.encoded_size)
    region.memory.close()
    pin(region, {torch.device(DEVICES[0])})  # Else the copies would wait by themselves.
    Encoder(layout).encode(there, region.contribution)  # Kernels are loaded and probed the first time.
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        there["w"].copy_(source)
        Encoder(layout).encode(there, region.contribution)
        found = bytes(region.contribution)
        there["w"].zero_()
    assert found == expected


def test_tensors_that_are_freed_at_once_and_codes_alone_on_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    count, move = [0], DeviceLane._move

    def counted(lane: DeviceLane, target: torch.Tensor, source: torch.Tensor) -> None:
        count[0] += source.numel() * source.element_size()
        move(lane, target, source)

    monkeypatch.setattr(DeviceLane, "_move", counted)
    named = {"w": values_of(LANE_VALUES).half(), "b": values_of(1280)}
    layout, encoder = Layout(Schema.of(named), parse_codec("int8")), None
    expected = stored_by(layout, named)
    stored = memoryview(bytearray(layout.encoded_size))
    assert stored_by(layout, moved(named, DEVICES[:1]), stored) == expected
    assert count == [layout.encoded_size]
    encoder = Encoder(layout)
    encoder.decode(stored, {name: torch.empty_like(one, device="cuda") for name, one in named.items()})
    assert torch.zeros(LANE_VALUES, device="cuda").any().item() is False
    encoder.settle()
    assert count == [2 * layout.encoded_size]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.3, 1 / 3, 2.0)])
def test_sums_and_means_are_those_of_a_cpu_but_for_fused_rounding(weights: tuple[float, ...]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 3)).cuda()
    like = dict(model.named_parameters())
    with torch.inference_mode():
        there, here = Accumulator(like), Accumulator({name: one.cpu() for name, one in like.items()})
    for seed, weight in enumerate(weights):
        gradients = {name: values_of(one.numel(), seed).reshape(one.shape) for name, one in like.items()}
        here.add(gradients, weight)
        there.add(moved(gradients, ["cuda"]), weight)
    binding = Binding(model, parse_codec("int8"))
    binding.prepare()
    region = Region.create(binding.size)
    region.memory.close()
    pin(region, binding.devices)
    binding.write_step(there, region.mean)
    mean: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        binding.read_step(region.mean, binding.stepped(), mean)
    binding.read_step(region.mean, binding.stepped(), mean)
    binding.settle()
    for name, total in here.sums.items():
        torch.testing.assert_close(there.sums[name].cpu(), total, rtol=1e-6, atol=1e-6)
        assert torch.equal(there.mean()[name].cpu(), there.sums[name].cpu() / there.weight)
        torch.testing.assert_close(mean[name].cpu(), here.mean()[name], rtol=0, atol=0.05)
        assert mean[name].device == like[name].device


def test_a_fork_leaves_the_memory_registered() -> None:
    region = Region.create(1 << 20)
    region.memory.close()
    pin(region, {torch.device("cuda:0")})
    child = os.fork()
    if child == 0:
        del region
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.frombuffer(region.mean, dtype=torch.uint8).is_pinned()
