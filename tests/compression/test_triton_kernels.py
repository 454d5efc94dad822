"""All kernels write the same bytes, each choice in its own process, Triton's in its interpreter; its PTX is checked."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.compression import choice

RUNNER = Path(__file__).with_name("identity.py")
CHECK = Path(__file__).parents[2] / "scripts" / "check_kernels.py"
SOURCE = Path(choice.__file__).with_name("triton_kernels.py")

INSTEAD = """
import importlib.util, runpy, sys
import equipoise.compression
name = "equipoise.compression.triton_kernels"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
equipoise.compression.triton_kernels = sys.modules[name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
script, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""
"""Runs the script of the second argument with the kernels of the first in place of the product's."""


def run(name: str, *command: str, interpreted: bool = True) -> subprocess.CompletedProcess[str]:
    if name != "torch":
        pytest.importorskip(name)
    environ = {**os.environ, choice.ENVIRONMENT: name, choice.INTERPRETER: str(int(interpreted))}
    return subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=280, check=False
    )


@functools.cache
def found(name: str, *flags: str) -> dict[str, str]:
    done = run(name, str(RUNNER), *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["kernels"], report["reason"]) == (name, f"{choice.ENVIRONMENT}={name}")
    return report["found"]


@pytest.mark.parametrize(
    ("name", "flags", "cases"),
    [
        ("numba", (), 8 * 3 * 2 + 16),
        ("triton", ("--few",), 3 * 2 * 2 + 3),
        pytest.param("triton", (), 8 * 3 * 2 + 16, marks=pytest.mark.slow),
    ],
)
def test_all_kernels_write_the_same_bytes(name: str, flags: tuple[str, ...], cases: int) -> None:
    expected, got = found("torch", *flags), found(name, *flags)
    assert len(expected) == 9 * (cases + 3) + 7
    assert "value 8123 of 9001 is nan" in expected["bf16 of nan"]
    assert [case for case in expected if got.get(case) != expected[case]] == []


def test_numpy_writes_the_bytes_of_torch_and_refuses_the_same() -> None:
    assert found("torch", "--arrays") == found("torch")


def changed(tmp_path: Path, old: str, new: str) -> str:
    """A copy of the Triton kernels with one change."""
    text = SOURCE.read_text()
    assert old in text
    path = tmp_path / "kernels.py"
    path.write_text(text.replace(old, new))
    return str(path)


def test_no_kernel_is_compiled_to_what_changes_bytes() -> None:
    done = run("triton", str(CHECK), interpreted=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 27
    assert all(line.endswith("ok") for line in lines)


@pytest.mark.parametrize(
    ("old", "new", "instruction"),
    [
        ('"enable_fp_fusion": False', '"enable_fp_fusion": True', "fma.rn.f32"),
        *(
            pytest.param(f"tl.math.div_rn({a}, {b})", f"{a} / {b}", "div.full.f32", marks=pytest.mark.slow)
            for a, b in (("absmax", "levels"), ("levels", "absmax"))
        ),
    ],
)
def test_the_check_sees_fusion_and_approximate_division(
    tmp_path: Path, old: str, new: str, instruction: str
) -> None:
    done = run(
        "triton",
        "-c",
        INSTEAD,
        changed(tmp_path, old, new),
        str(CHECK),
        "--codecs",
        "int8",
        interpreted=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"forbidden: {instruction}" in done.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(x * inverse[:, None] + _HALF_EVEN) - _HALF_EVEN", "tl.floor(x * inverse[:, None] + 0.5)"),
        pytest.param("bits + 0x7FFF + ((bits >> 16) & 1)", "bits + 0x8000", marks=pytest.mark.slow),
        pytest.param("magnitude, 0) >= _EXPONENT", "magnitude, 0) >= 0", marks=pytest.mark.slow),
        pytest.param("other=_ZEROS_NF4 if PER_BYTE == 2 else 0", "other=0", marks=pytest.mark.slow),
        pytest.param("range(members)", "range(members - 1, -1, -1)", marks=pytest.mark.slow),
    ],
)
def test_the_probe_refuses_kernels_that_write_other_bytes(tmp_path: Path, old: str, new: str) -> None:
    done = run("triton", "-c", INSTEAD, changed(tmp_path, old, new), str(RUNNER), "--choice")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["kernels"], report["reason"]) == (
        "torch",
        "triton's bytes differ from torch's on this machine",
    )
