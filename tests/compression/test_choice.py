"""The choice of kernels: once, with its reason, and nothing loaded before it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from equipoise.compression import CodecError, kernels
from equipoise.compression.choice import WORTH_VALUES, compiled

MODULE = "equipoise.compression.numba_kernels"


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("EQUIPOISE_KERNELS", raising=False)
    kernels.cache_clear()
    yield
    kernels.cache_clear()


def test_numba_where_it_is_installed() -> None:
    pytest.importorskip("numba")
    assert (kernels().name, kernels().reason) == ("numba", "numba is installed")
    assert kernels() is kernels()


@pytest.mark.parametrize("name", ["torch", "numba"])
def test_the_environment_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("EQUIPOISE_KERNELS", name)
    assert (kernels().name, kernels().reason) == (name, f"EQUIPOISE_KERNELS={name}")
    assert (kernels().arrays is None) == (name == "torch")


def test_an_unknown_name_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_KERNELS", "cython")
    with pytest.raises(
        CodecError, match="EQUIPOISE_KERNELS='cython' is not known; expected torch, numba, triton, or unset"
    ):
        kernels()


def test_kernels_are_loaded_for_many_values_and_then_serve_few_too() -> None:
    pytest.importorskip("numba")
    assert compiled(WORTH_VALUES - 1) is None
    assert kernels.cache_info().currsize == 0
    arrays = compiled(WORTH_VALUES)
    assert arrays is not None
    assert compiled(1) is arrays is kernels().arrays


@pytest.mark.parametrize("wanted", ["", "numba"])
def test_torch_where_numba_is_missing(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_KERNELS", wanted)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    assert kernels().name == "torch"
    assert kernels().reason.startswith("numba is not installed; pip install 'equipoise[fast]'")


def test_torch_where_numba_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no locator available\nfor the cache")

    monkeypatch.setitem(sys.modules, MODULE, Failing(MODULE))
    assert (kernels().name, kernels().reason) == ("torch", "numba failed: no locator available")


def test_torch_where_bytes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from equipoise.compression.numba_kernels import KERNELS

    def fused(
        addresses: np.ndarray,
        weights: np.ndarray,
        payload: np.ndarray,
        scratch: np.ndarray,
        block: int,
        bits: int,
    ) -> bool:
        total, decoded = np.zeros_like(scratch), np.empty_like(scratch)
        for address, weight in zip(addresses, weights, strict=True):
            theirs = np.array((ctypes.c_uint8 * payload.size).from_address(int(address)))
            KERNELS.decode(theirs, decoded, block, bits, False)
            # Rounded once for each member, not twice.
            total[:] = total.astype(np.float64) + float(np.float32(weight)) * decoded.astype(np.float64)
        return KERNELS.encode(total, payload, block, bits)

    monkeypatch.setattr(f"{MODULE}.KERNELS", replace(KERNELS, reduce=fused))
    assert (kernels().name, kernels().reason) == (
        "torch",
        "numba's bytes differ from torch's on this machine",
    )


def test_torch_where_contributions_are_added_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from equipoise.compression.numba_kernels import KERNELS

    def reduce(addresses: np.ndarray, weights: np.ndarray, *rest: Any) -> bool:
        return KERNELS.reduce(addresses[::-1].copy(), weights[::-1].copy(), *rest)

    monkeypatch.setattr(f"{MODULE}.KERNELS", replace(KERNELS, reduce=reduce))
    assert kernels().name == "torch"


FLOATS = """
import torch
for spec in ("fp32", "fp16", "bf16"):
    codec, values = parse_codec(spec), torch.ones(10)
    payload, mean = (bytearray(codec.encoded_size(10)) for _ in range(2))
    codec.encode(values, payload)
    codec.decode(payload, values)
    codec.reduce([payload], [1.0], mean, values)
"""


@pytest.mark.parametrize("then", ["parse_codec('int8')", FLOATS], ids=["parsing", "plain values"])
def test_codecs_without_kernels_load_no_numba(then: str) -> None:
    code = (
        f"import sys\nfrom equipoise.compression import parse_codec\n{then}\nsys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
