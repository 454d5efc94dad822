"""The benchmark of rounds measures real daemons beside gloo, and catches whoever averages nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_round.py"

FIELDS = {
    *("exchange_min_ms", "exchange_median_ms", "call_min_ms", "call_median_ms", "beyond_median_ms"),
    *("cpu_s", "wire_mb", "peak_mb", "daemon_beyond_tensors_mb", "x_gloo", "phases_median_ms"),
}


@pytest.mark.timeout(180)
def test_rounds_are_timed_and_results_checked() -> None:
    options = ["--peers", "2", "--values", "5000", "--rounds", "2", "--json"]
    systems = ["--systems", "ours/int8/aead/x3", "gloo", "nothing"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, *systems],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)
    ours, gloo, nothing = result["systems"]
    assert (result["peers"], result["values"]) == (2, 5000)
    assert ours.keys() >= FIELDS
    assert not {ours["failed"], ours["wrong"], gloo["failed"], gloo["wrong"]} - {0}
    assert 0 < ours["error"] <= 0.010
    assert gloo["error"] <= 1e-6
    # Every round of it is wrong, the warm ones too.
    assert nothing["wrong"] == 4
