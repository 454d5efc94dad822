"""The figures of a gossip run in `status`, and what a join loads."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from types import SimpleNamespace

import pytest

from equipoise.averaging.aio.run_driver import RoundCounts
from equipoise.averaging.outcome import Outcome
from equipoise.compression.choice import WORTH_VALUES
from equipoise.peer.daemon.run_view import _exchanges
from equipoise.peer.daemon.service import LOADS


def test_exchanges_in_doubt_are_counted_beyond_the_history() -> None:
    last = deque([Outcome(ok=True, reason="", apart=0.25), Outcome(ok=True, reason="", apart=None)], maxlen=2)
    search = SimpleNamespace(membership=SimpleNamespace(count=3))
    run = SimpleNamespace(search=search, counts=RoundCounts(last, ok=5000, failed=9, in_doubt=2))
    told = _exchanges(run)  # type: ignore[arg-type]
    assert (told.partners, told.ok, told.failed, told.in_doubt) == (3, 5000, 9, 2)
    assert told.spread == pytest.approx(0.25), "an exchange with a newcomer tells no distance"


JOIN = """
from equipoise.dht.hivemind_stub import bare_packages; bare_packages()
import asyncio, os, sys, threading
from types import SimpleNamespace
from equipoise.averaging.options import RunOptions
from equipoise.averaging.schema import Schema, TensorSpec
from equipoise.compression.codec import FloatCodec
from equipoise.compression.spec import CODECS
from equipoise.dht.gate import Gate
from equipoise.peer.control.messages import JoinRun
from equipoise.peer.daemon.service import Service
from equipoise.peer.shared_memory import Region

class OnTensors(FloatCodec):
    def __init__(self):
        super().__init__("fp32")
        self.spec, self.math = "tensors", None

class Watch:
    def find_spec(self, name, *rest):
        if name == "torch":
            print("off the loop" if threading.current_thread() is not threading.main_thread() else "on the loop")

async def say(line):
    print(line)

async def join(rule, codec, values):
    options = RunOptions(rule=rule, codec=codec, part_values=256)
    schema, size = Schema((TensorSpec("w", (values,), "float32"),)), 8192 + 8 * values
    memory = Region.create(size).memory
    fd = os.dup(memory.fd)
    service = Service(SimpleNamespace(exchange=lambda *_: None), SimpleNamespace(peer="", gate=Gate()))
    await service.join(JoinRun("run", options, schema, Schema(()), size), fd, "test", say)
    print("loaded" if "torch" in sys.modules else "not loaded")
    print(service.kernels.name, "numba" in sys.modules)

CODECS.register("tensors", OnTensors)
sys.meta_path.insert(0, Watch())
asyncio.run(join(*sys.argv[1:3], int(sys.argv[3])))
"""


def joined(rule: str, codec: str, values: int) -> list[str]:
    """What `JOIN` prints: whether torch is loaded, and how; the kernels, and whether numba is loaded."""
    command = [sys.executable, "-c", JOIN, rule, codec, str(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("rule", "codec"),
    [
        ("median", "int8"),
        pytest.param("trimmed", "fp32", marks=pytest.mark.slow),
        ("mean", "tensors"),
    ],
)
def test_joining_loads_torch_in_a_thread_if_rounds_will_use_it(rule: str, codec: str) -> None:
    assert joined(rule, codec, 1000) == [LOADS, "off the loop", "loaded", "numpy False"]


def test_joining_loads_kernels_for_a_run_that_is_worth_it() -> None:
    pytest.importorskip("numba")
    assert joined("mean", "int8", WORTH_VALUES - 1) == ["not loaded", "numpy False"]
    assert joined("mean", "int8", WORTH_VALUES) == [LOADS, "not loaded", "numba True"]
