"""Benchmarks measure real daemons, and catch whoever averages nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

FIELDS = {
    *("exchange_min_ms", "exchange_median_ms", "call_min_ms", "call_median_ms", "beyond_median_ms"),
    *("cpu_s", "wire_mb", "peak_mb", "daemon_beyond_tensors_mb", "x_gloo", "phases_median_ms"),
}


def run(script: str, *options: str) -> tuple[int, Any]:
    """Exit status of a script, and what it prints as JSON."""
    command = [sys.executable, str(SCRIPTS / script), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(180)
def test_rounds_are_timed_and_results_checked() -> None:
    systems = ["ours/int8/aead/x3", "gloo", "nothing"]
    options = ["--peers", "2", "--values", "5000", "--rounds", "2"]
    status, (result,) = run("bench_round.py", *options, "--systems", *systems)
    assert status == 1, "one of them averages nothing"
    ours, gloo, nothing = result["systems"]
    assert (result["peers"], result["values"]) == (2, 5000)
    assert ours.keys() >= FIELDS
    assert not {ours["failed"], ours["wrong"], gloo["failed"], gloo["wrong"]} - {0}
    assert 0 < ours["error"] <= 0.010
    assert gloo["error"] <= 1e-6
    # Every round of it is wrong, the warm ones too.
    assert nothing["wrong"] == 4


@pytest.mark.timeout(180)
def test_a_soak_counts_rounds_and_failures() -> None:
    _, verdict = run("soak.py", "--rounds", "30", "--values", "5000")
    assert verdict["rounds"] == 30
    assert verdict["failed"] == 0
    assert 0 < verdict["p50_ms"] <= verdict["p99_ms"]
    # On a busy machine so few rounds may well have a late one.
    assert not [line for line in verdict["violations"] if not line.startswith("p99")]


@pytest.mark.timeout(180)
def test_overlap_is_measured_in_three_ways() -> None:
    small = ["--mbit", "0", "--steps", "2", "--turns", "1", "--width", "32", "--accelerator", "50"]
    status, result = run("bench_overlap.py", *small)
    assert status == 0
    without, waiting, delayed = result["ways"]
    assert without["x"] == 1
    assert without["round_ms"] is None
    assert waiting["round_ms"] > 0 < delayed["round_ms"]
    for way in result["ways"]:
        assert way["step_ms"] > 50
        assert way["cpu_ms"].keys() == {"trainer", "daemon", "p2pd", "kernel"}
        assert way["cpu_ms"]["trainer"] > 0
