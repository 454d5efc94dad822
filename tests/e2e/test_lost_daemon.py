"""A daemon that is killed under a training script and started again, or stopped and continued."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.swarm import ChildProcess, Swarm, eventually

SCRIPT = """
import json, logging, pathlib, sys
import torch
from equipoise.peer import connect

logging.basicConfig(level=logging.WARNING, format="%(message)s")
torch.manual_seed(int(sys.argv[2]))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
end = pathlib.Path(sys.argv[3])
with connect(sys.argv[1]) as peer, peer.join("lost", model) as run:
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = run.optimizer(adamw, target_batch_size=16, batch_size=8, wait_for=1, patience=3.0)
    while not end.exists() or optimizer.epoch < int(end.read_text()):
        optimizer.zero_grad()
        inputs = torch.randn(8, 8)
        torch.nn.functional.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
        optimizer.step()
        together = optimizer.in_step and bool(optimizer.last) and not peer.lost
        print(json.dumps({"epoch": optimizer.epoch, "together": together, "lost": peer.lost}), flush=True)
    finished = optimizer.finish()
    print(json.dumps({"finished": finished.in_step, "state": optimizer.id.lineage, "why": finished.reason}))
"""


def last(script: ChildProcess) -> dict[str, Any]:
    lines = script.output.splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    found: dict[str, Any] = json.loads(whole[-1]) if whole else {}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["killed", "hung"])
def test_the_script_goes_on_and_ends_in_step_with_the_others(swarm: Swarm, lost: str) -> None:
    daemons = swarm.daemons(2, args=["--listen", "/ip4/127.0.0.1/tcp/0"])
    end = swarm.folder / "end"
    scripts = [swarm.script(SCRIPT, str(one.home), str(index), str(end)) for index, one in enumerate(daemons)]
    for script in scripts:
        eventually(
            lambda script=script: last(script).get("epoch", 0) >= 5 and last(script)["together"], "start", 90
        )

    daemons[1].kill() if lost == "killed" else daemons[1].pause()
    before = last(scripts[1])["epoch"]
    eventually(lambda: last(scripts[1])["lost"], "the loss", 60)
    eventually(lambda: last(scripts[1])["epoch"] >= before + 5, "training alone", 60)
    daemons[1].start() if lost == "killed" else daemons[1].resume()
    for script in scripts:
        eventually(lambda script=script: last(script)["together"], "both together", 120)
    target = max(last(script)["epoch"] for script in scripts) + 10
    end.with_suffix(".new").write_text(str(target))
    end.with_suffix(".new").rename(end)

    for script in scripts:
        assert script.wait(120) == 0, script.errors
    ends = [last(script) for script in scripts]
    assert all(one["finished"] for one in ends), ends
    assert ends[0]["state"] == ends[1]["state"]
    (said,) = scripts[1].errors.splitlines()
    pid, home = daemons[1].pid, daemons[1].home
    if lost == "killed":
        assert said.startswith(f"the daemon on {home} (process ")
        assert "has ended without a word: it was killed, or has crashed; this script goes on without" in said
    else:
        assert said.startswith(f"the daemon (pid {pid}) on {home} has not answered for ")
        plan = "it is stopped; this script goes on without, and connects when one is back"
        assert f"{plan}; have it go on with: kill -CONT {pid}" in said
