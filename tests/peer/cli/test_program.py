"""The command line says what was wrong with it in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from equipoise.peer.cli.program import run
from equipoise.peer.errors import ExitStatus


@pytest.mark.parametrize(
    "words", [["python", "-c", "print(1)"], ["--home", "x", "python", "train.py", "--epochs", "3"]]
)
def test_launch_without_dashes_says_where_they_belong(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", *words]) == ExitStatus.USAGE
    told = capsys.readouterr().err
    assert told.startswith("error: No such option")
    assert "put -- before the script's command, as in: equipoise launch --resume -- python train.py" in told


def test_launch_names_a_wrong_option_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--hom", "x", "--", "python", "train.py"]) == ExitStatus.USAGE
    assert "put --" not in capsys.readouterr().err


def test_python_m_equipoise_is_the_command_line() -> None:
    asked = [sys.executable, "-m", "equipoise", "--version"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.startswith("equipoise ")
