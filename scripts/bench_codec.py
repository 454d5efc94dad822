"""Time every codec on every kernel beside a plain copy in the same run: one core, milliseconds."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from equipoise.compression import Codec, kernels, parse_codec, unwrapped
from equipoise.compression.choice import ENVIRONMENT, NAMES

BLOCKWISE = "int8"
"""Only this codec's arithmetic has kernels to choose from."""


def measure(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Least and median milliseconds of `call` after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return {"min": round(min(times), 2), "median": round(statistics.median(times), 2)}


def bench_codec(codec: Codec, count: int, repeats: int) -> dict[str, dict[str, float]]:
    source, target = torch.randn(count), torch.zeros(count)
    values, out = unwrapped(source), unwrapped(target)
    payload, mean = (memoryview(bytearray(codec.encoded_size(count))) for _ in range(2))
    others, weights = [payload, payload, payload, None], [0.25] * 4
    return {
        "copy": measure(lambda: target.copy_(source), repeats),
        "encode": measure(lambda: codec.encode(values, payload), repeats),
        "check": measure(lambda: codec.check(payload, count), repeats),
        "decode": measure(lambda: codec.decode(payload, out), repeats),
        "reduce 4": measure(lambda: codec.reduce(others, weights, values, mean, out), repeats),
    }


def bench_kernels(specs: list[str], count: int, repeats: int) -> list[dict[str, object]]:
    torch.set_num_threads(1)
    start = time.perf_counter()
    chosen = kernels()
    choosing = round((time.perf_counter() - start) * 1e3)
    rows: list[dict[str, object]] = []
    for codec in map(parse_codec, specs):
        row = {"codec": codec.spec, "kernels": chosen.name, "reason": chosen.reason, "choosing_ms": choosing}
        rows.append({**row, "ms": bench_codec(codec, count, repeats)})
    return rows


def bench_all(specs: list[str], count: int, repeats: int) -> list[dict[str, object]]:
    """Kernels are chosen once per process: one process for each."""
    rows: list[dict[str, object]] = []
    for name in NAMES:
        mine = [spec for spec in specs if name == "torch" or spec.startswith(BLOCKWISE)]
        if not mine:
            continue
        command = [
            sys.executable,
            __file__,
            "--worker",
            "--values",
            str(count),
            "--repeats",
            str(repeats),
            *mine,
        ]
        done = subprocess.run(
            command, env={**os.environ, ENVIRONMENT: name}, stdout=subprocess.PIPE, check=True, timeout=600
        )
        rows.extend(json.loads(done.stdout))
    return rows


def table(rows: list[dict[str, object]], count: int) -> str:
    lines = [f"{count} values, {count * 4 / 2**20:.0f} MiB of fp32, one thread; milliseconds, least / median"]
    for row in rows:
        figures = row["ms"]
        assert isinstance(figures, dict)
        cells = "  ".join(f"{what} {ms['min']:6.2f} /{ms['median']:6.2f}" for what, ms in figures.items())
        lines.append(f"{row['codec']:<15} {row['kernels']:<6} {cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="*", default=["fp32", "fp16", "bf16", "int8"], metavar="CODEC")
    parser.add_argument("--values", type=int, default=16 * 2**20, help="values per vector (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each kind (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    run = bench_kernels if options.worker else bench_all
    rows = run(options.specs, options.values, options.repeats)
    print(json.dumps(rows) if options.json or options.worker else table(rows, options.values))


if __name__ == "__main__":
    main()
