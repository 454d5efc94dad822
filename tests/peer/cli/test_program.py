"""The command line says what was wrong with it in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.dht.identity import peer_of
from equipoise.dht.membership import bans
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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"--parameters": "1x"}, "expected a number such as 350M or 1B, got '1x'"),
        ({"--up": "20Mb"}, "expected a rate such as 20Mbit or 2.5MB/s, got '20Mb'"),
        ({"--step": "soon"}, "expected a time such as 1.2s, 300ms or 1d, got 'soon'"),
        ({"--step": "0s"}, "expected step above 0, got 0.0"),
        ({"--codec": "int9"}, "unknown codec 'int9'"),
    ],
)
def test_a_plan_names_what_it_cannot_read(
    changed: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--parameters": "1B", "--peers": "8", "--up": "20Mbit", "--down": "100Mbit", "--step": "1.2s"}
    assert run(["plan", *(word for pair in (given | changed).items() for word in pair)]) != ExitStatus.OK
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_ban_is_kept_without_a_daemon_until_it_is_lifted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer, place = peer_of(bytes(32)), ["--home", str(tmp_path)]
    assert run(["ban", peer, "--reason", "noise", *place]) == ExitStatus.OK
    assert bans(tmp_path) == {peer: "noise"}
    assert run(["allow", peer, *place]) == ExitStatus.OK
    assert bans(tmp_path) == {}
    for wrong in (["allow", peer], ["ban", "12D3"], ["swarm", "revoke", "x"]):
        capsys.readouterr()
        assert run([*wrong, *place]) != ExitStatus.OK
        assert capsys.readouterr().err.count("\n") == 1
