"""What one member of real daemons can do to the others' means: by its weight, its values, and its faults in rounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from adversary import attackers
from e2e.fleet import Fleet, normal
from e2e.swarm import CLI, DaemonProcess, Swarm
from e2e.threads import begin, together
from equipoise.peer import Run

ATTACK_SECONDS, MEASURED_SECONDS = 60.0, 40.0


def attacker(swarm: Swarm, way: str, first: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> DaemonProcess:
    with monkeypatch.context() as patch:
        patch.setattr("e2e.swarm.CLI", (CLI[0], attackers.__file__, way))
        return swarm.daemon("attacker", join=[first.address])


def test_no_weight_and_no_value_is_the_mean_by_itself(swarm: Swarm) -> None:
    daemons = swarm.daemons(3)
    values = normal(3, 1000)
    with Fleet(daemons[:2], values[:2], codec="fp32") as fleet:
        outcomes = [pending.result() for pending in fleet.start([1.0, 1e12])]
        boast = fleet.clients[1].peer_id
        assert all(outcomes), outcomes
        assert outcomes[0].capped == {boast: 1e12}
        assert outcomes[0].contributors[boast] == 10.0
        assert f"..{boast[-8:]} counts 10 of 1e+12" in outcomes[0].reason
        fleet.check(dict(enumerate(outcomes)), 1e-6)
    values[2] = torch.full((1000,), 1e30)
    with Fleet(daemons, values, codec="fp32") as fleet:
        outcomes = fleet.whole([1.0] * 3)
        assert set(outcomes[0].shrunk) == {fleet.clients[2].peer_id}
        moved = (fleet.tensors[0] - (values[0] + values[1]) / 3).norm()
        assert moved <= 1.01 * 10 * max(values[0].norm(), values[1].norm()) / 3


def pace(runs: Sequence[Run], seconds: float) -> float:
    """Rounds a second in which all of these end with a mean, of all but the first third of the time."""
    began, ends = time.monotonic(), []
    while time.monotonic() < began + seconds:
        pending = [run.average(weight=1.0, timeout=20.0, wait=False) for run in runs]
        outcomes = [one.result() for one in pending]
        ends += [time.monotonic()] if all(outcomes) else []
    since = began + seconds / 3
    return sum(at > since for at in ends) / (time.monotonic() - since)


def take_part(run: Run, over: threading.Event) -> None:
    while not over.is_set():
        run.average(weight=1.0, timeout=20.0)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stall", "nan", "each", "mute"])
def test_a_member_at_fault_leaves_the_others_most_of_their_rounds(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    daemons, over = swarm.daemons(4), threading.Event()
    with Fleet(daemons, normal(4, 100_000), codec="fp32") as fleet:
        before = pace(fleet.runs, 20.0)
    daemons[3].stop()
    hostile = attacker(swarm, way, daemons[0], monkeypatch)
    with Fleet([*daemons[:3], hostile], normal(4, 100_000), codec="fp32") as fleet:
        end = begin(take_part, fleet.runs[3], over)
        after = pace(fleet.runs[:3], ATTACK_SECONDS)
        rows = daemons[0].json("peers")
        faults = [row["faults"] for row in rows if row["peer"] == fleet.clients[3].peer_id]
        over.set()
        end.result(30.0)
    print(
        f"{way}: {before:.2f} rounds a second before, {after:.2f} in the last {MEASURED_SECONDS:g} s: {faults}"
    )
    assert after >= 0.6 * before
    assert way == "mute" or all(faults)


@pytest.mark.slow
def test_a_gossip_partner_that_does_not_vote_leaves_the_others_most_of_their_exchanges(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons = swarm.daemons(4)
    values, over = normal(5, 100_000), threading.Event()

    def exchanges(runs: Sequence[Run], seconds: float) -> float:
        began = time.monotonic()

        def gossip(run: Run) -> int:
            ends = []
            while time.monotonic() < began + seconds:
                ends += [time.monotonic()] if run.average(weight=1.0, timeout=20.0) else []
            return sum(at > began + seconds / 3 for at in ends)

        return sum(together(gossip, runs)) / (seconds * 2 / 3)

    with Fleet(daemons, values[:4], codec="fp32", strategy="gossip") as fleet:
        before = exchanges(fleet.runs, 20.0)
    hostile = attacker(swarm, "mute", daemons[0], monkeypatch)
    with Fleet([*daemons, hostile], values, codec="fp32", strategy="gossip") as fleet:
        end = begin(take_part, fleet.runs[4], over)
        after = exchanges(fleet.runs[:4], ATTACK_SECONDS)
        over.set()
        end.result(30.0)
    print(f"gossip: {before:.2f} exchanges a second before, {after:.2f} in the last {MEASURED_SECONDS:g} s")
    assert after >= 0.6 * before
