"""Command line and daemon start without torch; neither the former nor the client of a script pulls in hivemind."""

from __future__ import annotations

import subprocess
import sys

VERBS = ("demo", "daemon", "launch", "status", "peers", "rounds", "stop")

REPORT = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"

HELP = f"""
import contextlib, sys
from equipoise.peer.cli import main
for words in ([], *([verb] for verb in sys.argv[1:])):
    sys.argv[1:] = [*words, "--help"]
    with contextlib.suppress(SystemExit):
        main()
{REPORT}
"""


def test_help_is_light() -> None:
    assert not _modules(HELP, *VERBS) & {"torch", "hivemind", "numpy", "grpc", "sklearn"}


def test_a_daemon_without_a_run_needs_neither_torch_nor_kernels() -> None:
    bare = "from equipoise.dht.hivemind_stub import bare_packages; bare_packages()"
    loaded = _modules(f"{bare}\nimport equipoise.peer.daemon.daemon, equipoise.peer.daemon.wiring\n{REPORT}")
    assert "equipoise" in loaded
    assert not loaded & {"torch", "numba", "llvmlite", "grpc", "prometheus_client"}


def test_the_front_loads_what_is_asked_for() -> None:
    assert "torch" not in _modules(
        f"import equipoise\nassert equipoise.__version__, dir(equipoise)\n{REPORT}"
    )
    asked = (
        "from equipoise import Peer, connect\nimport equipoise.peer\nassert connect is equipoise.peer.connect"
    )
    assert not _modules(f"{asked}\nassert Peer is equipoise.peer.Peer\n{REPORT}") & {
        "hivemind",
        "grpc",
        "sklearn",
    }


def test_training_needs_none_of_the_libraries_that_it_adapts_to() -> None:
    loaded = _modules(f"import equipoise.peer.training.checkpoint, equipoise.peer.training\n{REPORT}")
    assert not loaded & {"hivemind", "grpc", "transformers", "lightning", "accelerate", "safetensors"}


def _modules(code: str, *args: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())
