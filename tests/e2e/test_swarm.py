"""The hygiene that every end-to-end test relies on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from e2e.forked import Forked, environment
from e2e.swarm import CLI, Swarm, eventually

ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(child.pid, flush=True)
"""


def test_a_process_that_outlives_its_parent_is_found_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("e2e.swarm.LEFTOVER_SECONDS", 0.2)
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


@pytest.mark.parametrize("words", [("daemon", "--show-config"), ("status",), ("rounds", "--limit", "0")])
def test_a_forked_process_does_as_an_executed_one(tmp_path: Path, words: tuple[str, ...]) -> None:
    env = {**environment(), "EQUIPOISE_HOME": "home", "EQUIPOISE_NAME": "box"}
    done = subprocess.run([*CLI, *words], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    out, err = tmp_path / "out", tmp_path / "err"

    status = Forked([*CLI[1:], *words], env, out, err, tmp_path).wait(60)

    assert (status, out.read_text(), err.read_text()) == (done.returncode, done.stdout, done.stderr)
    assert done.stdout or done.stderr


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
