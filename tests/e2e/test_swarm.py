"""The hygiene that every end-to-end test relies on."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from e2e.swarm import Swarm, eventually

ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(child.pid, flush=True)
"""


def test_what_outlives_its_parent_is_found_named_and_ended(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    script = swarm.script(ORPHAN)
    eventually(lambda: script.output.endswith("\n"), "the orphan's pid")

    left = swarm.close()

    assert len(left) == 1
    assert "signal.pause" in left[0]
    eventually(lambda: not _alive(int(script.output)), "the orphan's end")


def test_a_paused_process_is_ended_too(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    script = swarm.script("import signal; print('up', flush=True); signal.pause()")
    eventually(lambda: script.output, "its first line")
    script.pause()

    assert swarm.close() == []
    assert not script.running


def test_waiting_in_vain_says_for_what() -> None:
    with pytest.raises(TimeoutError, match="rain"):
        eventually(lambda: False, "rain", seconds=0.05)


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
