"""Benchmarks measure real daemons, and find a system that averages nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_round

from e2e.netns import available

SCRIPTS = Path(bench_round.__file__).parent

TIMES = {
    *("exchange_min_ms", "exchange_median_ms", "call_min_ms", "call_median_ms", "beyond_median_ms"),
    *("cpu_s", "wire_mb", "peak_mb"),
}
OURS = {*TIMES, "daemon_beyond_tensors_mb", "phases_median_ms", "x_gloo"}

RIVALS = ("gloo", "hivemind/fp16", "hivemind/none")
ALL = (
    "ours/fp32/tls",
    "ours/fp16/aead",
    "ours/int8/aead",
    "ours/int8/aead/torch/x2000",
    *RIVALS,
    "wire/int8",
)


def run(script: str, *options: str) -> tuple[int, Any]:
    """Exit status of a script, and what it prints as JSON."""
    command = [sys.executable, str(SCRIPTS / script), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_every_kind_of_system_is_measured_and_its_results_are_checked() -> None:
    options = ["--peers", "2", "--values", "5000", "--rounds", "1"]
    status, (result,) = run("bench_round.py", *options, "--systems", *ALL, "nothing")
    assert status == 1, "the last of them averages nothing"
    *systems, nothing = result["systems"]
    # Every round of it is wrong, the warm ones too.
    assert (nothing["system"], nothing["wrong"]) == ("nothing", 3)
    rows = {row["system"]: row for row in systems}
    assert tuple(rows) == ALL
    for name, row in rows.items():
        rivals = {f"x_{rival}" for rival in RIVALS if rival != name}
        columns = (OURS if name.startswith("ours") else TIMES) | rivals
        assert row.keys() >= columns, (name, row.get("reasons"))
        assert (row["rounds"], row["failed"], row["wrong"]) == (1, 0, 0), (name, row.get("reasons"))
        assert (row["error"] > 0) == (name != "wire/int8"), name
    assert rows["ours/int8/aead"]["of_wire"] > 0
    # Each system's bytes are its codec's: what one member sends of two, at least, is half a vector and half a mean.
    for name, bytes_per_value in (("ours/fp32/tls", 4), ("ours/fp16/aead", 2), ("ours/int8/aead", 1)):
        assert 2 * 5000 * bytes_per_value < 1e6 * rows[name]["wire_mb"], name


@pytest.mark.netns
@pytest.mark.skipif(available() != "", reason=available() or "available")
def test_rounds_over_shaped_links_are_held_to_what_the_links_allow() -> None:
    options = ["--peers", "2", "--values", "500k", "--rounds", "1", "--shape", "200mbit"]
    status, (result,) = run("bench_round.py", *options, "--systems", "ours/int8/aead", "gloo")
    assert status == 0
    assert result["shape"] == [200.0, 200.0]
    ours, gloo, wire = result["systems"]
    assert wire["system"] == "wire/int8", "what the links allow is measured beside, unasked"
    assert ours.keys() >= {*OURS, "best_ms", "x_best", "of_wire"}
    assert not {row[key] for row in (ours, gloo, wire) for key in ("failed", "wrong")} - {0}
    # 2 x 1/2 x 500k int8 values at 200 Mbit/s, and gloo's are four times as long; a link's first burst is free.
    assert ours["best_ms"] == pytest.approx(20.6, abs=0.1)
    assert ours["x_best"] > 0.5 < gloo["x_best"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--systems", "ours/int8/aead", "gluu"], "expected names that begin with ours, gloo"),
        (
            ["--systems", "ours/int8/aad"],
            "ours/int8/aad: expected cuda[:N], on-cuda[:N], xN or one of aead, tls",
        ),
        (["--systems", "ours/int8/cuda"], "ours/int8/cuda: torch finds 0 CUDA devices on this machine"),
        (["--shape", "50mbit,200mbit"], "--shape names 2 links: give --peers 2"),
        (["--shape", "200mbit"], "no networks here"),
        (["--values", "many"], "invalid count value: 'many'"),
    ],
)
def test_bench_round_refuses_what_it_cannot_measure(
    options: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_round, "available", lambda: "no networks here")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="2"):
        bench_round.parse(options)
    *_, line = capsys.readouterr().err.splitlines()
    assert told in line
