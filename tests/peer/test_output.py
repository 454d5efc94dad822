"""What the command line prints."""

from __future__ import annotations

import pytest

from equipoise.peer.cli.output import print_peers
from equipoise.peer.status import PeerRow


def test_each_peer_has_a_line_that_says_how_it_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    why = "relay ..abcdefgh: 1 MB passed in 0.08 s; not dialled: 1 of 1 peer failed, nobody answers at \x1b[31m44.0.0.1"
    rows = [
        PeerRow(run, f"12D3KooW{'x' * 32}abcdefghijkl", False, True, 7, False, 0.0, 0.0, True, "relayed", why)
        for run in ("one", "two")
    ]
    print_peers(rows)
    lines = capsys.readouterr().out.splitlines()
    [reached] = [line for line in lines if "relayed:" in line]
    assert reached.startswith("abcdefghijkl")
    assert "nobody answers at" in reached
    assert "\x1b" not in reached


def test_a_peer_with_other_options_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    said = "target batch size: here 4096, there 2048"
    row = PeerRow(
        "digits/step", "12D3KooWabcdefghijkl", False, True, 7, True, 0.0, 0.0, False, "direct", "", said
    )
    print_peers([row])
    printed = capsys.readouterr().out
    assert "other options" in printed
    assert f"digits/step: other options: {said}" in " ".join(printed.split())


def test_no_peers_are_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    print_peers([])
    assert capsys.readouterr().out == "no peers: no script takes part in a run\n"
