"""Compile every Triton kernel to PTX, without a GPU, and look for instructions that would change bytes.

Exits with 1 if a kernel holds a fused multiply-add, an approximate division or one that flushes subnormal numbers, in
single precision: it would write other bytes than a CPU, which Triton's interpreter cannot show.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Triton reads it when it is imported: the interpreter compiles nothing.
os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from equipoise.compression import Codec, parse_codec, triton_kernels

FORBIDDEN = re.compile(r"(?:fma|mad)\S*\.f32\S*|div\.full\S*|\S*\.approx\S*|\S*\.ftz\S*")
"""Instructions of single precision that are not one correctly rounded operation on all numbers."""

SPECS = (
    "fp32",
    "fp16",
    "bf16",
    "int8:block=32",
    "int8",
    "int8:block=4096",
    "nf4",
    "sparse",
    "sparse:group=32",
)
WARP = 32
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    float: "fp32",
    int: "i32",
}
"""Triton's names of the types that launches are given, tensors as pointers."""

Launch = tuple[JITFunction, tuple[object, ...], dict[str, Any]]


def launches(codec: Codec) -> list[Launch]:
    """Every launch that a codec makes: the kernel, its arguments and options. Nothing runs."""
    seen: list[Launch] = []

    def record(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        seen.append((self, args, options))

    values = torch.zeros(4096 * 4)
    payload = torch.zeros(codec.encoded_size(values.numel()), dtype=torch.uint8)
    run, JITFunction.run = JITFunction.run, record
    try:
        triton_kernels.KERNELS.encode(values, payload, codec.kind)
        triton_kernels.KERNELS.decode(payload, values, codec.kind)
        triton_kernels.KERNELS.reduce([payload] * 2, [0.5] * 2, payload, values.numel(), codec.kind)
    finally:
        JITFunction.run = run
    return seen


def ptx_of(launch: Launch, arch: int) -> str:
    kernel, args, options = launch
    signature, constants, aligned = {}, {}, {}
    for parameter, value in zip(kernel.params, args, strict=True):
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value)
            signature[parameter.name] = TYPES[kind]
            if kind is not float and parameter.name != "members":
                # As for a vector of a length in sixteens, whose values are loaded several at a time.
                aligned[(parameter.num,)] = [["tt.divisibility", 16]]
    compiled = compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", arch, WARP),
        options=options,
    )
    return str(compiled.asm["ptx"])


def faults(ptx: str) -> Iterator[str]:
    """The instructions of a kernel that are forbidden, as they stand there."""
    for line in ptx.splitlines():
        # A predicate may stand before the instruction; names of files and labels do not count.
        words = re.sub(r"^@!?%\w+", "", line.strip()).split()
        if words and FORBIDDEN.fullmatch(words[0].rstrip(";")):
            yield line.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, as 80 or 90 (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the PTX of each kernel there")
    parser.add_argument(
        "--codecs", nargs="+", metavar="CODEC", default=SPECS, help="by default all: %(default)s"
    )
    options = parser.parse_args()
    failed = False
    for spec in options.codecs:
        for launch in launches(parse_codec(spec)):
            name, ptx = (
                f"{launch[0].__name__.lstrip('_')}-{spec.replace(':block=', '-')}",
                ptx_of(launch, options.arch),
            )
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / f"{name}.ptx").write_text(ptx)
            found = list(faults(ptx))
            failed |= bool(found)
            print(f"{name:<24} sm_{options.arch}", f"{len(found)} forbidden: {found[0]}" if found else "ok")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
