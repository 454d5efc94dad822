"""`scripts/train_text.py`, as a stranger runs it, and what its loops ask of a user."""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

LOOPS = SCRIPTS / "text_loops.py"

LEARNT = 3.0
"""Nats: 4.57 know nothing, and two outer steps are too few to beat one alone."""

MOST_LINES = 6
"""That the loop of plain PyTorch may change by, imports included, to train together."""


def train(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "train_text.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


def lines_of(function: str) -> list[str]:
    """The body of a loop, without its docstring and without indentation, which a `with` changes."""
    text = LOOPS.read_text()
    (found,) = (
        node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function
    )
    start, end = found.body[1].lineno - 1, found.end_lineno
    return [line.strip() for line in text.splitlines()[start:end]]


def imports(lines: list[str]) -> list[str]:
    """The lines that import what of ours these lines use."""
    found = [line for line in LOOPS.read_text().splitlines() if line.startswith("from equipoise")]
    return [line for line in found if any(line.split()[-1] in one for one in lines)]


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_peers_train_together() -> None:
    done = train("--peers", "2", "--steps", "40", "--every", "20", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows: dict[str, Any] = {row["method"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["alone", "whole", "sync", "diloco"]
    for method in ("sync", "diloco"):
        assert rows[method]["identical"] == 2
        assert rows[method]["held_out_loss"] < LEARNT
        assert 0 <= rows[method]["waiting"] < 1
    assert rows["sync"]["held_out_loss"] < rows["alone"]["held_out_loss"]
    assert rows["diloco"]["bytes_sent"] < rows["sync"]["bytes_sent"] / 10
    assert all(row["tokens_per_s"] > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("options", "hint"), [(("--peers", "1"), "--peers from 2"), (("--steps", "70"), "multiple of --every 50")]
)
def test_wrong_usage_is_one_line(
    options: tuple[str, ...], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", ["train_text.py", *options])

    with pytest.raises(SystemExit) as ended:
        importlib.import_module("train_text").main()

    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("function", ["target_batch", "diloco"])
def test_a_loop_of_plain_pytorch_changes_by_few_lines(function: str) -> None:
    difference = difflib.ndiff(lines_of("plain"), lines_of(function))
    changed = [line for line in difference if line.startswith(("+ ", "- "))]
    assert 1 < len(changed) + len(imports(lines_of(function))) <= MOST_LINES, changed
