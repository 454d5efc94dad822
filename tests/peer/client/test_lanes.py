"""Encoding on devices, rehearsed on the CPU by lanes that queue everything and do it when somebody waits."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.averaging.layout import Layout
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.schema import Schema, SchemaError
from equipoise.compression import parse_codec
from equipoise.peer.client import encoding, lanes
from equipoise.peer.client.encoding import Encoder
from equipoise.peer.client.lanes import DeviceLane, kernels_of
from equipoise.peer.client.run import RunCore
from equipoise.peer.client.tensors import Binding
from equipoise.peer.control.messages import JoinRun, StartRound
from equipoise.peer.run import Run
from equipoise.peer.shared_memory import Region
from fakes.vectors import norm_of

DEVICES = (torch.device("cpu:0"), torch.device("cpu"))
"""Two devices that are the CPU and differ."""

LARGE_VALUES = 4096
"""In place of the encoder's own, so that Triton's interpreter needs seconds."""

SPECS = ["fp32", "fp16", "bf16", "int8", "int8:block=4096", "nf4"]


class QueuingLane(DeviceLane):
    """Of a device whose work is done when somebody waits for it, by closures in their order."""

    opened: list[QueuingLane]
    moved = 0

    def _enter(self, aside: bool) -> None:
        self.aside, self.queue = aside, []
        self.opened.append(self)

    def _current(self) -> Any:
        return contextlib.nullcontext()

    def launch(self, work: Callable[..., None], *args: Any) -> None:
        self.queue.append(partial(work, self, *args))

    def mark(self) -> Callable[[], None]:
        return self.run

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        type(self).moved += source.numel()
        super()._move(target, source)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[QueuingLane]:
    """All CPU tensors lie on such a device."""
    monkeypatch.setattr(lanes, "LINKED", ("cpu",))
    monkeypatch.setattr(encoding, "DeviceLane", QueuingLane)
    monkeypatch.setattr(encoding, "LARGE_VALUES", LARGE_VALUES)
    QueuingLane.opened, QueuingLane.moved = [], 0
    return QueuingLane


def values_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def tensors() -> dict[str, torch.Tensor]:
    return {
        "large": values_of(2 * LARGE_VALUES + 77),
        "tiny": values_of(3, 1),
        "half": values_of(LARGE_VALUES + 4096, 2).half(),
        "small half": values_of(500, 3).half(),
        "strided": values_of(80 * 100, 4).reshape(80, 100).t(),
        "small strided": values_of(600, 5).reshape(20, 30).t(),
        "double": values_of(300, 6).double(),
        "negated": torch._neg_view(values_of(700, 7)),
        "scalar": torch.tensor(2.5),
        "small": values_of(3000, 8),
    }


def layout_of(named: dict[str, torch.Tensor], spec: str, buffers: Collection[str] = ()) -> Layout:
    return Layout(Schema.of(named, buffers), parse_codec(spec))


def stored_by(encoder: Encoder, named: dict[str, torch.Tensor], divisor: float = 1.0) -> bytearray:
    out = bytearray(b"\xff" * encoder.layout.encoded_size)
    _, norm = encoder.encode(named, memoryview(out), divisor)
    assert norm == pytest.approx(norm_of(encoder.layout, memoryview(out)), rel=1e-3)
    return out


def on_host(monkeypatch: pytest.MonkeyPatch, layout: Layout, named, divisor: float = 1.0) -> bytearray:
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "LINKED", ())
        return stored_by(Encoder(layout), named, divisor)


def zeros_like(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).zero_()
        for name, one in named.items()
    }


@pytest.fixture(params=[4096, encoding.LANE_VALUES], ids=["many spans", "one span"])
def span(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "LANE_VALUES", request.param)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("divisor", [1.0, 3.7])
def test_bytes_and_values_are_those_of_the_host(device, span, monkeypatch, spec: str, divisor: float) -> None:
    named = tensors()
    encoder = Encoder(layout_of(named, spec, {"tiny", "scalar"}))
    expected = on_host(monkeypatch, encoder.layout, named, divisor)
    stored = stored_by(encoder, named, divisor)
    assert stored == expected
    assert device.opened[0].aside
    assert device.opened[0].queue == []
    back, theirs = zeros_like(named), zeros_like(named)
    encoder.decode(memoryview(stored), back)
    assert not any(one.any() for one in back.values()), "the work was only queued"
    encoder.settle()
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "LINKED", ())
        Encoder(encoder.layout).decode(memoryview(expected), theirs)
    assert all(torch.equal(back[name], theirs[name]) for name in named)
    assert not any(lane.aside for lane in device.opened[1:])


def test_tensors_that_change_after_encoding_change_no_bytes(device) -> None:
    named = tensors()
    encoder = Encoder(layout_of(named, "int8"))
    stored = stored_by(encoder, named)
    before = bytes(stored)
    for tensor in named.values():
        tensor.zero_()
    encoder.settle()
    assert stored == before


def test_codes_alone_cross_the_link(device) -> None:
    named = {"half": values_of(128 * 1024).half(), "strided": values_of(256 * 128).reshape(256, 128).t()}
    named |= {"small": values_of(1280), "double": values_of(100).double()}
    encoder = Encoder(layout_of(named, "int8"))
    stored = stored_by(encoder, named)
    assert device.moved == encoder.layout.encoded_size
    encoder.decode(memoryview(stored), named)
    encoder.settle()
    assert device.moved == 2 * encoder.layout.encoded_size


def test_two_devices_and_the_host_share_a_module(device, monkeypatch) -> None:
    named = {str(at): values_of(size, at) for at, size in enumerate([300, 400, 100_000, 500, 600, 5, 700, 8])}
    places = {
        named[name].data_ptr(): (*DEVICES, None)[at]
        for name, at in zip(named, (0, 0, 1, 1, 2, 0, 1, 2), strict=True)
    }
    monkeypatch.setattr(encoding, "linked", lambda one: None if one is None else places[one.data_ptr()])
    encoder = Encoder(layout_of(named, "int8"))
    stored = stored_by(encoder, named)
    monkeypatch.setattr(encoding, "linked", lambda one: None)
    expected = stored_by(Encoder(encoder.layout), named)
    assert stored == expected
    assert [lane.device for lane in device.opened] == list(DEVICES)
    back = zeros_like(named)
    places = {back[name].data_ptr(): (*DEVICES, None)[at % 3] for at, name in enumerate(named)}
    monkeypatch.setattr(encoding, "linked", lambda one: None if one is None else places[one.data_ptr()])
    encoder.decode(memoryview(stored), back)
    encoder.settle()
    theirs = zeros_like(named)
    monkeypatch.setattr(encoding, "linked", lambda one: None)
    Encoder(encoder.layout).decode(memoryview(expected), theirs)
    assert all(torch.equal(back[name], theirs[name]) for name in named)


@pytest.mark.parametrize("name", ["large", "small half", "double"])
@pytest.mark.parametrize("spec", ["fp32", "int8"])
def test_a_value_that_is_not_finite_is_named_after_all_work_has_ended(
    device, span, spec: str, name: str
) -> None:
    named = tensors()
    named[name][99] = float("nan")
    with pytest.raises(SchemaError, match=rf"tensor '{name}' holds nan at flat index 99: "):
        stored_by(Encoder(layout_of(named, spec)), named)


@pytest.mark.parametrize("where", ["launch", "encode"])
def test_an_error_in_the_middle_waits_for_what_was_queued(device, monkeypatch, where: str) -> None:
    named, ran = {str(at): values_of(LARGE_VALUES, at) for at in range(4)}, []
    encode = DeviceLane.encode

    def counted(lane: DeviceLane, *args: Any) -> None:
        ran.append(1)
        if where == "encode" and len(ran) == 3:
            raise MemoryError("here")
        encode(lane, *args)

    def launch(lane: QueuingLane, work: Callable[..., None], *args: Any) -> None:
        if where == "launch" and len(lane.queue) == 3:
            raise MemoryError("here")
        lane.queue.append(partial(work, lane, *args))

    monkeypatch.setattr(QueuingLane, "encode", counted)
    monkeypatch.setattr(QueuingLane, "launch", launch)
    with pytest.raises(MemoryError, match="here"):
        stored_by(Encoder(layout_of(named, "int8")), named)
    assert len(ran) == 3


def test_the_next_round_waits_until_the_mean_was_read(device) -> None:
    model = torch.nn.Linear(100, 30)
    binding = Binding(model, parse_codec("int8"))
    region = Region.create(binding.size)
    started = []

    def start(request: Any) -> None:
        if isinstance(request, StartRound):  # The daemon has the memory now.
            region.mean[:] = b"\xff" * len(region.mean)
            started.append(request)

    link: Any = SimpleNamespace(welcome=SimpleNamespace(peer_id="me"), lost=None, start=start, clock=float)
    request = JoinRun("r", RunOptions(), binding.schema, binding.gradients, binding.size)
    binding.devices = frozenset()  # There is no CUDA to register the memory with.
    run: Run = Run(RunCore(link, request, binding, region, lambda *_: run))
    wanted = {name: torch.full_like(one, 3.0) for name, one in model.state_dict().items()}
    for encoder, finish in (
        (binding.averages, lambda: run._averaged(Outcome(ok=True, reason=""), binding.tensors(), region, {})),
        (binding.steps, lambda: run._stepped(Outcome(ok=True, reason=""), binding.stepped(), region, "me")),
    ):
        encoder.encode(wanted, region.mean)
        finish()
        run._start_average(0.0, 1.0, moves=False)
        run.pending = None
    assert all(torch.equal(one, wanted[name]) for name, one in model.named_parameters())
    assert all(torch.equal(run.mean[name], one) for name, one in wanted.items())
    assert len(started) == 2
    region.memory.close()


def test_autograd_sees_that_a_tensor_was_overwritten(device) -> None:
    weight = torch.nn.Parameter(values_of(100_000))
    encoder = Encoder(layout_of({"w": weight}, "int8"))
    stored = stored_by(encoder, {"w": weight})
    loss = (weight * weight).sum()
    encoder.decode(memoryview(stored), {"w": weight})
    encoder.settle()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class FakeCuda:
    """The calls that register memory, and what is mapped when they come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.error, self.registered, self.calls = error, {}, []
        self.current: torch.device | None = None
        monkeypatch.setattr(lanes, "_cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.calls.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "device", self._made_current)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert self.current == DEVICES[0]
        self.registered[address] = size
        return self.error

    @contextlib.contextmanager
    def _made_current(self, device: torch.device) -> Iterator[None]:
        self.current = device
        yield
        self.current = None

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        assert self.current == DEVICES[0]
        self.calls.append(f"unregister {Path('/proc/self/maps').read_text().count(f'{address:x}-')}")
        del self.registered[address]


def test_memory_is_unregistered_while_it_is_mapped_and_nothing_reads_it(monkeypatch) -> None:
    cuda, region = FakeCuda(monkeypatch), Region.create(5000)
    lanes.pin(region, {DEVICES[0]})
    assert list(cuda.registered.values()) == [10_000]
    assert cuda.calls == []
    region.memory.close()
    del region
    gc.collect()
    assert cuda.calls == ["synchronize", "unregister 1"]


def test_only_the_process_that_registered_memory_unregisters_it(monkeypatch) -> None:
    cuda, region = FakeCuda(monkeypatch), Region.create(5000)
    lanes.pin(region, {DEVICES[0]})
    region.memory.close()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        del region
        gc.collect()
    assert cuda.calls == []


def test_memory_that_cuda_does_not_take_or_of_no_device_is_used_as_it_is(monkeypatch) -> None:
    cuda, region = FakeCuda(monkeypatch, error=1), Region.create(5000)
    lanes.pin(region, {})
    assert cuda.registered == {}
    lanes.pin(region, {DEVICES[0]})
    region.memory.close()
    del region
    gc.collect()
    assert cuda.calls == []


def test_tensors_of_other_devices_go_by_the_cpu() -> None:
    assert kernels_of(torch.device("mps")).endswith(", by the CPU, for mps")
    assert kernels_of(torch.device("cpu")) in kernels_of(torch.device("mps"))


def test_a_run_names_the_kernels_of_each_device_once() -> None:
    devices = [torch.device(name) for name in ("mps", "cpu", "cpu")]
    named = {str(at): SimpleNamespace(device=one) for at, one in enumerate(devices)}
    run = Run.__new__(Run)
    run.core = SimpleNamespace(binding=SimpleNamespace(tensors=lambda: named))  # type: ignore[assignment]
    assert set(run.kernels.split("; ")) == {
        *kernels_of(devices[0]).split("; "),
        *kernels_of(devices[1]).split("; "),
    }
    assert run.kernels.count("by the CPU, for mps") == 1


@pytest.mark.parametrize("queued", [False, True])
def test_strided_tensors_pass_through_memory_for_one_of_them(device, monkeypatch, queued: bool) -> None:
    monkeypatch.setattr(lanes, "LINKED", ("cpu",) if queued else ())
    monkeypatch.setattr(encoding, "LANE_VALUES" if queued else "SPAN_VALUES", 4096)
    named = {str(at): values_of(9000, at).reshape(90, 100).t() for at in range(3)}
    sizes = []
    for kind in (lanes.Lane, DeviceLane):

        def allocate(lane: Any, values: int, codes: int, dense: int, do: Any = kind._allocate) -> None:
            sizes.append(dense)
            do(lane, values, codes, dense)

        monkeypatch.setattr(kind, "_allocate", allocate)
    encoder, back = Encoder(layout_of(named, "fp32")), zeros_like(named)
    encoder.decode(memoryview(stored_by(encoder, named)), back)
    encoder.settle()
    assert all(torch.equal(back[name], named[name]) for name in named)
    assert set(sizes) <= {9000, 0}
