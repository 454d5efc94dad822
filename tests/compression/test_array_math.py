"""Codecs without torch: with arrays, numpy makes the bytes that torch makes with tensors, and refuses the same."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from equipoise.compression import CodecError, kernels, parse_codec

SPECS = ("fp32", "fp16", "bf16", "int8:block=32", "int8", "nf4")

WITHOUT_TORCH = """
import sys
import numpy as np
from equipoise.compression import parse_codec

for spec in {specs}:
    codec, values, out = parse_codec(spec), np.arange(1000, dtype=np.float32), np.empty(1000, np.float32)
    one, mean = (memoryview(bytearray(codec.encoded_size(1000))) for _ in range(2))
    codec.encode(values, one)
    codec.check(one, 1000)
    codec.reduce([one, one, one], [0.5, 0.25, 0.25], mean, values)
    codec.decode(mean, out)
    assert abs(out - np.arange(1000)).max() < (200 if spec == "nf4" else 8), spec
sys.exit("torch" in sys.modules)
"""


@pytest.mark.parametrize("choice", ["torch", "numba"])
def test_arrays_need_no_torch(choice: str) -> None:
    if choice == "numba":
        pytest.importorskip("numba")
    script = WITHOUT_TORCH.format(specs=SPECS)
    environment = {**os.environ, "EQUIPOISE_KERNELS": choice}
    assert (
        subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=False).returncode
        == 0
    )


@pytest.fixture
def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EQUIPOISE_KERNELS", "torch")
    kernels.cache_clear()
    yield
    kernels.cache_clear()


@pytest.mark.usefixtures("numpy_alone")
@pytest.mark.parametrize("spec", SPECS)
def test_a_payload_that_no_encoder_writes_is_refused(spec: str) -> None:
    codec, out = parse_codec(spec), np.empty(100, np.float32)
    payload = memoryview(bytearray(codec.encoded_size(100)))
    codec.encode(np.zeros(100, np.float32), payload)
    codec.check(payload, 100)
    payload[:] = b"\xff" * len(payload)
    for call in (lambda: codec.check(payload, 100), lambda: codec.decode(payload, out)):
        with pytest.raises(CodecError, match=r"is nan"):
            call()
    with pytest.raises(CodecError, match="100 values are"):
        codec.check(payload[:-1], 100)


@pytest.mark.usefixtures("numpy_alone")
def test_a_code_of_minus_128_is_refused() -> None:
    codec = parse_codec("int8")
    payload = memoryview(bytearray(codec.encoded_size(100)))
    payload[-3] = 0x80
    with pytest.raises(CodecError, match="code 97 of 100 is -128"):
        codec.check(payload, 100)
