"""A daemon's process has only the part of hivemind that the DHT needs; another process has all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

BARE = "from equipoise.dht.hivemind_stub import bare_packages; bare_packages()"
SWARM = "import equipoise.dht.swarm"
WHOLE = "import hivemind; assert hivemind.Optimizer and hivemind.DHT and hivemind.utils.nested_map"


def test_the_swarm_needs_no_torch_beside_bare_packages() -> None:
    heavy = "{'torch', 'numba', 'grpc', 'multihash', 'hivemind.p2p.p2p_daemon'}"
    _run(BARE, SWARM, f"import sys; assert not {heavy} & sys.modules.keys()")


@pytest.mark.parametrize("order", [(SWARM, WHOLE), (WHOLE, BARE, SWARM, WHOLE)])
def test_a_process_of_others_has_hivemind_whole(order: tuple[str, ...]) -> None:
    _run(*order)


def test_a_name_that_is_not_there_is_an_import_error() -> None:
    _run(
        BARE,
        "import pytest",
        "with pytest.raises(ImportError, match='nested_map'): from hivemind.utils import nested_map",
    )


def _run(*lines: str) -> None:
    """Run lines of code in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
