"""The frames of a round of twelve daemons: once all hold the mean, they are silent."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from e2e.counted import COUNTED
from e2e.fleet import Fleet, normal
from e2e.swarm import CLI, Swarm, eventually

DAEMONS, ROUNDS, ROUND_SECONDS = 12, 20, 1.0
TESTS = Path(__file__).resolve().parents[1]

BEFORE = 180
"""Frames of a round that each daemon wrote, of which 138 were heartbeats, when two rounds that were over beat on."""

pytestmark = pytest.mark.slow


def test_twelve_daemons_say_little_after_a_round(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    monkeypatch.setenv(COUNTED, str(tmp_path))
    monkeypatch.setattr("e2e.swarm.CLI", (*CLI[:-1], "from e2e.counted import main; main()"))
    listen = ["--listen", "/ip4/127.0.0.1/tcp/0"]
    first = swarm.daemon(args=listen)
    others = [swarm.daemon(join=[first.address], args=listen, wait=False) for _ in range(DAEMONS - 1)]
    for daemon in others:
        eventually(lambda daemon=daemon: daemon.states, f"{daemon.home.name}'s first state", 300.0)
    full = 0
    with Fleet([first, *others], normal(DAEMONS, 200_000), 120.0, codec="int8", group_size=DAEMONS) as fleet:
        for number in range(ROUNDS):
            due = time.monotonic() + ROUND_SECONDS
            outcomes = [pending.result() for pending in fleet.start([1.0] * DAEMONS)]
            full += all(len(outcome.contributors) == DAEMONS for outcome in outcomes)
            eventually(lambda due=due: time.monotonic() >= due, f"a second for round {number}")
    for daemon in [first, *others]:
        daemon.stop()
    counts: Counter[str] = Counter()
    for path in tmp_path.glob("*.json"):
        counts.update(json.loads(path.read_text()))
    per = {kind: count / DAEMONS / ROUNDS for kind, count in counts.most_common()}
    print(f"{full} of {ROUNDS} rounds full; frames a round and daemon: {sum(per.values()):.0f}", per)
    assert sum(per.values()) <= 0.4 * BEFORE
