"""Time every codec on every kernel beside a plain copy in the same run: one core, or a GPU; bits and error.

On a CPU, `torch` gets tensors, as in a script; `numpy` and `numba` get arrays, as in a daemon. On a GPU, times are
between events of its stream, and `link` is of a script: a tensor on the GPU to the encoded vector in pinned memory,
and back, beside a pinned copy of as many bytes. Triton's kernels are launched as codecs launch them, without the wait
for their notes; torch's figures are those of the whole call of the codec, since it waits in between.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from equipoise.averaging.layout import Layout
from equipoise.averaging.schema import Schema
from equipoise.compression import Codec, kernels, parse_codec
from equipoise.compression.choice import ENVIRONMENT
from equipoise.peer.client.encoding import Encoder
from equipoise.peer.client.lanes import pin
from equipoise.peer.shared_memory import Region

NAMES = {"cpu": ("torch", "numpy", "numba"), "cuda": ("torch", "triton")}
"""The kernels that are compared on each kind of device."""

LAUNCH_CYCLES = 2_000_000
"""Cycles that a GPU is kept busy before a timed call, about a millisecond: all of the call is queued meanwhile, so that
times hold no launch."""

LINK = LINK_COPY, *_ = ("link copy", "link encode", "link decode")
"""What is measured of the link between a GPU and the host."""

LINK_VALUES = 2**26
"""Most values that cross the link: it is slow beside the GPU's memory."""

DRAWN = 2**20
"""Values by which a codec's error is told."""

UNCOMPILED = "fp32"
"""The codec for which numba has no kernels."""


def measure(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Least and median milliseconds of `call` after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return {"min": round(min(times), 2), "median": round(statistics.median(times), 2)}


def bench_codec(codec: Codec, count: int, repeats: int, arrays: bool) -> dict[str, dict[str, float]]:
    source, target = torch.randn(count), torch.zeros(count)
    values, out = (source.numpy(), target.numpy()) if arrays else (source, target)
    payload, mean = (
        memoryview(bytearray(size)) for size in (codec.encoded_size(count), codec.mean_size(count, 4))
    )
    four, weights = [payload] * 4, [0.25] * 4
    return {
        "copy": measure(lambda: target.copy_(source), repeats),
        "encode": measure(lambda: codec.encode(values, payload), repeats),
        "check": measure(lambda: codec.check(payload, count), repeats),
        "decode": measure(lambda: codec.decode(payload, out), repeats),
        "accumulate": measure(lambda: codec.accumulate(payload, 0.25, out), repeats),
        "reduce 4": measure(lambda: codec.reduce(four, weights, mean, out), repeats),
        "mean of 4": measure(lambda: codec.decode_mean(mean, weights, out), repeats),
    }


def quality(codec: Codec) -> dict[str, float]:
    """Bits a value; the 2-norm of the error over that of the values, on N(0, 1) and on Student's t of 3 degrees."""
    found, generator = {"bits": 8 * codec.encoded_size(DRAWN) / DRAWN}, np.random.default_rng(0)
    for name, drawn in (("N(0, 1)", generator.normal(size=DRAWN)), ("t3", generator.standard_t(3, DRAWN))):
        values, out = drawn.astype(np.float32), np.empty(DRAWN, np.float32)
        payload = bytearray(codec.encoded_size(DRAWN))
        codec.encode(values, payload)
        codec.decode(payload, out)
        found[name] = float(np.linalg.norm(out - values) / np.linalg.norm(values))
    return found


def measure_on(device: torch.device, call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Least and median milliseconds between events on a GPU's current stream, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        torch.cuda._sleep(LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end))
    return {"min": round(min(times), 4), "median": round(statistics.median(times), 4)}


def bench_on(device: torch.device, codec: Codec, count: int, repeats: int) -> dict[str, dict[str, float]]:
    """As `bench_codec`; `share` is of the bandwidth of a copy in the same run, by the bytes that a pass must move."""
    values, out = torch.randn(count, device=device), torch.zeros(count, device=device)
    size = codec.encoded_size(count)
    payload, mean = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    codec.encode(values, payload)
    # Copies: one payload four times would come from the cache.
    four, weights, fused = [payload.clone() for _ in range(4)], [0.25] * 4, kernels(str(device)).tensors
    calls: dict[str, tuple[Callable[[], object], int]] = {"copy": (lambda: out.copy_(values), 8 * count)}
    if fused:
        calls["encode"] = (lambda: fused.encode(values, payload, codec.kind), 4 * count + size)
        calls["decode"] = (lambda: fused.decode(payload, out, codec.kind), 4 * count + size)
        calls["reduce 4"] = (lambda: fused.reduce(four, weights, mean, count, codec.kind), 5 * size)
    else:
        calls["encode"] = (lambda: codec.encode(values, payload), 4 * count + size)
        calls["decode"] = (lambda: codec.decode(payload, out), 4 * count + size)
        calls["reduce 4"] = (lambda: codec.reduce(four, weights, mean, out), 5 * size)
    found = {}
    with torch.cuda.device(device):
        for what, (call, moved) in calls.items():
            found[what] = measure_on(device, call, repeats)
            found[what]["bandwidth"] = moved / found[what]["min"] / 1e6
    found |= bench_link(codec, values[:LINK_VALUES], repeats)
    for what, each in found.items():
        reference = LINK_COPY if what in LINK else "copy"
        each["share"] = round(each["bandwidth"] / found[reference]["bandwidth"], 2)
    return {what: {**each, "bandwidth": round(each["bandwidth"])} for what, each in found.items()}


def bench_link(codec: Codec, values: torch.Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """A tensor to its encoded vector in a run's pinned memory and back, as a script does; wall time."""
    named, device = {"w": values}, values.device
    layout = Layout(Schema.of(named), codec)
    region, encoder = Region.create(layout.encoded_size), Encoder(layout)
    region.memory.close()
    pin(region, {device})
    host = torch.frombuffer(region.contribution, dtype=torch.uint8)
    assert host.is_pinned()
    there = torch.empty(layout.encoded_size, dtype=torch.uint8, device=device)
    encoder.encode(named, region.mean)

    def decode() -> None:
        encoder.decode(region.mean, named)
        encoder.settle()

    def copy() -> None:
        host.copy_(there, non_blocking=True)
        torch.cuda.synchronize(device)

    calls = (copy, lambda: encoder.encode(named, region.contribution), decode)
    found = {what: measure(call, repeats) for what, call in zip(LINK, calls, strict=True)}
    return {
        what: {**each, "bandwidth": layout.encoded_size / each["min"] / 1e6} for what, each in found.items()
    }


def bench_kernels(
    device: torch.device, specs: list[str], count: int, repeats: int, name: str
) -> list[dict[str, object]]:
    torch.set_num_threads(1)
    start = time.perf_counter()
    chosen = kernels() if device.type == "cpu" else kernels(str(device))
    choosing = round((time.perf_counter() - start) * 1e3)
    rows: list[dict[str, object]] = []
    for codec in map(parse_codec, specs):
        used = name if name == "numpy" else chosen.name
        row = {"codec": codec.spec, "kernels": used, "reason": chosen.reason, "choosing_ms": choosing}
        if device.type == "cpu":
            figures = bench_codec(codec, count, repeats, arrays=name != "torch")
        else:
            figures = bench_on(device, codec, count, repeats)
        rows.append({**row, "device": name_of(device), "ms": figures, "quality": quality(codec)})
    return rows


def name_of(device: torch.device) -> str:
    return "one thread" if device.type == "cpu" else torch.cuda.get_device_name(device)


def bench_all(device: torch.device, specs: list[str], count: int, repeats: int) -> list[dict[str, object]]:
    """Kernels are chosen once per process: one process for each."""
    rows: list[dict[str, object]] = []
    for name in NAMES[device.type]:
        mine = [spec for spec in specs if name != "numba" or spec != UNCOMPILED]
        if not mine:
            continue
        options = ["--device", str(device), "--values", str(count), "--repeats", str(repeats)]
        done = subprocess.run(
            [sys.executable, __file__, "--worker", name, *options, *mine],
            env={**os.environ, ENVIRONMENT: "torch" if name == "numpy" else name},
            stdout=subprocess.PIPE,
            check=True,
            timeout=600,
        )
        rows.extend(json.loads(done.stdout))
    return rows


def table(rows: list[dict[str, object]], count: int) -> str:
    where = rows[0]["device"] if rows else "nothing"
    lines = [f"{count} values, {count * 4 / 2**20:.0f} MiB of fp32, {where}; milliseconds, least / median"]
    for row in rows:
        figures = row["ms"]
        assert isinstance(figures, dict)
        cells = "  ".join(f"{what} {cell(ms)}" for what, ms in figures.items())
        assert isinstance(row["quality"], dict)
        errors = "  ".join(f"{what} {figure:.3g}" for what, figure in row["quality"].items())
        lines.append(f"{row['codec']:<15} {row['kernels']:<6} {cells}  {errors}")
        if ENVIRONMENT not in str(row["reason"]):  # Others were asked for.
            lines.append(f"  {row['reason']}")
    return "\n".join(lines)


def cell(ms: dict[str, float]) -> str:
    if "share" not in ms:
        return f"{ms['min']:6.2f} /{ms['median']:6.2f}"
    return f"{ms['min']:7.3f} /{ms['median']:7.3f} ({ms['share']:.0%})"


def device_of(text: str) -> torch.device:
    """The device of that name; refused if its kind is not compared."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda[:n], got {text!r}")
    return torch.device(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "specs", nargs="*", default=["fp32", "fp16", "bf16", "int8", "nf4", "sparse"], metavar="CODEC"
    )
    parser.add_argument("--device", type=device_of, default="cpu", help="cpu, or cuda[:n] (%(default)s)")
    parser.add_argument("--values", type=int, default=16 * 2**20, help="values per vector (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each kind (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.device.index or 0) >= (count := torch.cuda.device_count()) and options.device.type == "cuda":
        parser.error(f"--device {options.device}: torch finds {count} CUDA devices on this machine")
    given = options.device, options.specs, options.values, options.repeats
    rows = bench_kernels(*given, options.worker) if options.worker else bench_all(*given)
    print(json.dumps(rows) if options.json or options.worker else table(rows, options.values))


if __name__ == "__main__":
    main()
