"""`equipoise demo`, as a stranger runs it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from e2e.swarm import ChildProcess, Swarm, eventually

DEMO_SECONDS = 150
"""Half a minute on two idle cores. The demo itself goes on for as long as something happens."""


def finish(demo: ChildProcess) -> dict[str, Any]:
    status = demo.wait(DEMO_SECONDS)
    assert status == 0, demo.output + demo.errors
    summary: dict[str, Any] = json.loads(demo.output)
    return summary


@pytest.mark.slow
def test_federated_rounds_learn_what_no_peer_has_alone(swarm: Swarm, tmp_path: Path) -> None:
    plot = tmp_path / "accuracy.svg"
    words = (
        "--strategy",
        "federated:fraction=0.5",
        "--split",
        "classes:each=5",
        "--outer",
        "fedyogi:eta=0.03",
    )
    demo = swarm.command("demo", *words, "--kill", "1", "--rounds", "20", "--plot", str(plot), "--json")
    summary = finish(demo)
    assert summary["ok"], summary
    assert summary["bit_identical"]
    assert summary["accuracy"] > summary["accuracy_alone"] + 0.2
    assert [number for number, _ in summary["curve"]] == list(range(1, 21))
    assert f"accuracy by round: {plot}" in demo.errors
    assert "<svg" in plot.read_text()


def test_people_see_rounds_and_a_verdict(swarm: Swarm) -> None:
    demo = swarm.command("demo", "--peers", "2", "--rounds", "5", "--codec", "fp32")
    status = demo.wait(DEMO_SECONDS)
    assert "round 5" in demo.output
    assert "test accuracy" in demo.output
    assert "equal bit for bit on 2 of 2" in demo.output
    assert ("It worked." in demo.output) == (status == 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_it_is_interrupted(swarm: Swarm, number: int) -> None:
    demo = swarm.command("demo", "--peers", "2", "--rounds", "10000")
    eventually(lambda: "round 2" in demo.output or not demo.running, "the second round", DEMO_SECONDS)
    assert demo.running, demo.output + demo.errors
    demo.signal(number)
    assert demo.wait(30) != 0
    assert "Traceback" not in demo.errors
    # That no process of the demo remains is what the fixture checks.


def test_wrong_usage_is_one_line(swarm: Swarm) -> None:
    demo = swarm.command("demo", "--strategy", "gosip")
    assert demo.wait(60) == 2
    assert "did you mean 'gossip'?" in demo.errors
    assert "Traceback" not in demo.errors
