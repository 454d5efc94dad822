"""Real daemons keep the promises of a round while they are killed, stopped and cut off; `scripts/chaos.py` in small."""

from __future__ import annotations

import pytest

from e2e.chaos.campaign import Campaign, Plan
from e2e.chaos.faults import KILL, KINDS, NEED_LINKS, P2PD, RESTART, STOP
from e2e.chaos.residue import residue
from e2e.chaos.verdict import Verdict, table
from e2e.chaos.wires import Wires
from e2e.netns import Network, available
from e2e.swarm import Swarm

pytestmark = pytest.mark.timeout(1800)

LENIENCY = 6.0
"""Other tests run beside these; how long things take is what `scripts/chaos.py` is for."""


def run(plan: Plan, swarm: Swarm, wires: Wires | None = None) -> None:
    campaign = Campaign(plan, swarm, wires)
    try:
        story = campaign.run()
    finally:
        left = campaign.close()
    story.left = [*left, *residue(campaign.pids)]
    verdict = Verdict(story, LENIENCY)
    print(table(verdict.figures()))
    assert not verdict.broken


def test_promises_hold_while_daemons_die_and_stop(swarm: Swarm) -> None:
    run(Plan(3, 8, 4, 200_000, "int8", (KILL, STOP, RESTART, P2PD), timeout=20.0), swarm)


@pytest.mark.slow
@pytest.mark.parametrize(("peers", "seed"), [(4, 11), (8, 12)])
def test_promises_hold_through_many_faults(swarm: Swarm, peers: int, seed: int) -> None:
    kinds = tuple(kind for kind in KINDS if kind not in NEED_LINKS)
    run(Plan(seed, 60, peers, 1_000_000, "int8", kinds, timeout=20.0), swarm)


@pytest.mark.netns
@pytest.mark.skipif(available() != "", reason=available() or "available")
def test_promises_hold_while_links_are_cut_and_slow(swarm: Swarm) -> None:
    with Network(4) as network:
        run(Plan(5, 20, 4, 200_000, "int8", NEED_LINKS, timeout=20.0), swarm, Wires(network))
