"""The guides' scripts as a new user starts them: two or three at once, again and again, on idle and busy cores.

    scripts/first_hour.py --times 20                  # the whole matrix: 160 rows, an hour
    scripts/first_hour.py --times 3 --launches 2 --script train.py --cores idle

Each row tells how every launch of one start ended. Exits 1 unless in every row all exit with 0, at least one round was
ok with all of them as contributors, all hold the same parameters at the end, and none waited for a timeout: of a round,
or of the end, so that every launch ends soon after all have met.

The scripts wait for one other peer. Of three launches each waits for two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_load import end_cleanly_when_terminated

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from e2e.swarm import CLI, ChildProcess, Swarm  # noqa: E402 - of the folder that was just added

SCRIPTS = {"train.py": "README.md", "local.py": "peer/training/README.md"}
"""Each script's page."""

LAUNCH_SECONDS = 200.0
"""Most seconds of one launch before it is ended: longer than all timeouts of a script together."""

LATE_SECONDS = 10.0
"""Most seconds from when all launches of a row have met to the end of the last. What a script trains takes under one
second, and the shortest timeout that a script may wait for, that of `finish`, is ten."""

NO_GROUP = "no group within"
"""In the reason of a round that waited for its timeout. A round that a peer itself ends waits for none."""

RESULT = "first-hour: "
"""Before the line of JSON in which a script tells how it ended."""


def written(name: str, launches: int) -> str:
    """The guides' script of that name, told how many others to wait for."""
    page = (ROOT / SCRIPTS[name]).read_text()
    found = re.search(rf"^```python\n(# {re.escape(name)}\n.*?)^```$", page, re.M | re.S)
    if found is None:
        raise SystemExit(f"{SCRIPTS[name]} has no script {name}")
    return found[1].replace("wait_for=1", f"wait_for={launches - 1}")


def inside(path: str) -> None:
    """Run a script, and say at the end what its rounds came to and which parameters it holds."""
    from blake3 import blake3

    from equipoise.averaging.outcome import Outcome
    from equipoise.peer.client.run import JoinedRun

    began = time.time()
    rounds: list[dict[str, Any]] = []
    counted, agreed = JoinedRun._collected, JoinedRun.wait_for
    met: list[float] = []

    def noted(self: JoinedRun, outcome: Outcome | None) -> None:
        if outcome is not None:
            rounds.append(
                {
                    "ok": outcome.ok,
                    "contributors": sorted(outcome.contributors),
                    "reason": outcome.reason,
                    "seconds": outcome.seconds.get("total", 0.0),
                }
            )
        counted(self, outcome)

    def waited(self: JoinedRun, peers: int, timeout: float = 60.0) -> bool:
        found = agreed(self, peers, timeout)
        met.append(time.time())
        return found

    JoinedRun._collected, JoinedRun.wait_for = noted, waited  # type: ignore[method-assign]
    left = runpy.run_path(path, run_name="__main__")
    parameters = b"".join(one.detach().numpy().tobytes() for one in left["model"].parameters())
    told = {
        "rounds": rounds,
        "digest": blake3(parameters).hexdigest()[:12],
        "began": began,
        "met": met[-1] if met else began,
        "ended": time.time(),
    }
    print(f"{RESULT}{json.dumps(told)}", flush=True)


def launched(swarm: Swarm, name: str, address: str, index: int) -> ChildProcess:
    """A launch with a home of its own, which runs the script through `inside`."""
    home = swarm.folder / f"{name.removesuffix('.py')}-{index}"
    command = [*CLI, "launch", "--join", address, "--home", str(home), "--"]
    command += [sys.executable, str(Path(__file__).resolve()), "--inside", name]
    process = ChildProcess(command, home, swarm.env)
    swarm.processes.append(process)
    process.spawn(swarm.folder)
    return process


def told_by(process: ChildProcess) -> dict[str, Any] | None:
    """What a launch's script has said of its end; None if it has said nothing."""
    lines = [line for line in process.output.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[-1].removeprefix(RESULT)) if lines else None


def problems(processes: list[ChildProcess], seconds: float) -> list[str]:
    """What is wrong with how the launches of one row ended, a line each."""
    found = [told_by(process) for process in processes]
    wrong = [
        f"launch {index} ended with status {process.returncode}"
        for index, process in enumerate(processes)
        if process.returncode != 0 or found[index] is None
    ]
    ends = [one for one in found if one is not None]
    if len(ends) < len(processes):
        return [*wrong, f"{len(ends)} of {len(processes)} told how they ended"]
    most = max((len(one["contributors"]) for end in ends for one in end["rounds"] if one["ok"]), default=0)
    if most < len(processes):
        wrong.append(f"at most {most} of {len(processes)} contributed to a round")
    if len({end["digest"] for end in ends}) > 1:
        wrong.append(f"they end with different parameters: {', '.join(end['digest'] for end in ends)}")
    wrong += [
        f"launch {index} waited for a timeout, {one['seconds']:.1f} s: {one['reason']}"
        for index, end in enumerate(ends)
        for one in end["rounds"]
        if not one["ok"] and NO_GROUP in one["reason"]
    ]
    met = max(end["met"] for end in ends)
    late = max(end["ended"] for end in ends) - met
    if late > LATE_SECONDS:
        wrong.append(f"the last ended {late:.1f} s after all had met")
    return wrong


def row(swarm: Swarm, script: str, launches: int, address: str) -> tuple[list[str], str]:
    """Start a script so often at once; returns what went wrong, and a line on how each launch ended."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=swarm.folder))
    (folder / script).write_text(written(script, launches))
    name = str((folder / script).relative_to(swarm.folder))
    processes = [launched(swarm, name, address, index) for index in range(launches)]
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAUNCH_SECONDS)
        if process.running:
            process.stop()
    seconds = time.monotonic() - began
    ends = []
    for process in processes:
        told = told_by(process) or {"rounds": [], "digest": "nothing", "met": 0.0, "ended": 0.0}
        ok = [len(one["contributors"]) for one in told["rounds"] if one["ok"]]
        ends.append(
            f"[status {process.returncode}, ok rounds of {ok or 'nobody'}, "
            f"{told['ended'] - told['met']:.1f} s after meeting, {told['digest']}]"
        )
    return problems(processes, seconds), f"{seconds:5.1f} s {' '.join(ends)}"


@contextlib.contextmanager
def cores(kind: str) -> Iterator[None]:
    """Idle cores, or as many processes that do nothing but compute."""
    count = (os.cpu_count() or 1) if kind == "busy" else 0
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    """Run the rows that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="starts of each kind")
    parser.add_argument("--script", choices=SCRIPTS, action="append", help="default: both")
    parser.add_argument("--launches", type=int, action="append", help="at once; default: 2 and 3")
    parser.add_argument("--cores", choices=("idle", "busy"), action="append", help="default: both")
    parser.add_argument("--keep", action="store_true", help="leave homes and logs of rows that failed")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        inside(asked.inside)
        return 0
    end_cleanly_when_terminated()
    failed = rows = 0
    for kind in asked.cores or ("idle", "busy"):
        for script in asked.script or SCRIPTS:
            for launches in asked.launches or (2, 3):
                bad = 0
                for index in range(asked.times):
                    wrong = once(kind, script, launches, index, asked.keep)
                    bad += bool(wrong)
                print(f"== {script}, {launches} launches, {kind} cores: {asked.times - bad} of {asked.times}")
                failed, rows = failed + bad, rows + asked.times
    print(f"{rows - failed} of {rows} rows as they should be")
    return 1 if failed else 0


def once(kind: str, script: str, launches: int, index: int, keep: bool) -> list[str]:
    """One row: a swarm of its own with one daemon that stays, and the launches that join it."""
    folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
    swarm = Swarm(folder)
    try:
        entry = swarm.daemon("entry", args=["--listen", "/ip4/127.0.0.1/tcp/0"])
        with cores(kind):
            wrong, line = row(swarm, script, launches, entry.address)
    finally:
        leftovers = swarm.close()
    wrong += [f"left behind: {one}" for one in leftovers]
    print(f"{kind} {script} x{launches} #{index}: {line}", flush=True)
    for one in wrong:
        print(f"    {one}", flush=True)
    if keep and wrong:
        print(f"    kept in {folder}", flush=True)
    else:
        subprocess.run(["rm", "-rf", str(folder)], check=False)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
