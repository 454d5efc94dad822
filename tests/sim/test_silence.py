"""Once all living members hold the mean, they are silent."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from equipoise.averaging.allreduce import messages as wire
from simulator.faults import Fault, When
from simulator.member import Frame
from simulator.network import Weather
from simulator.scenario import group_of, starts_of
from simulator.world import Scenario, World

MEMBERS = 12
LINKS = Weather(latency=(0.0005, 0.005), transfer=(0.001, 0.002))


class Counting(World):
    """Counts the frames of each member by kind."""

    def _send(self, frame: Frame, forged: bool = False) -> None:
        self.frames[frame.sender, type(frame.message)] += 1
        super()._send(frame, forged)

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.frames: Counter[tuple[int, type[wire.RoundMessage]]] = Counter()


def world(*faults: tuple[When, Fault], core: int = (1 << MEMBERS) - 1) -> Counting:
    group = group_of(range(MEMBERS), [1.0] * MEMBERS)
    starts = starts_of(Random(5), group, 60.0)
    return Counting(Scenario(5, group, starts, LINKS, faults, core))


def test_a_round_that_all_hold_ends_in_silence() -> None:
    made = world()
    assert made.run().seconds < 1.0
    beats = [made.frames[member, wire.Heartbeat] for member in range(MEMBERS)]
    assert max(beats) <= 2 * (MEMBERS - 1), "5 s of beats are 21 times the other members"


@pytest.mark.parametrize("noticed", [0.02, None], ids=["killed", "silent"])
def test_a_dead_member_costs_no_beats_for_long(noticed: float | None) -> None:
    made = world((When(member=0, phase="gather"), Fault(World.kill, 3, noticed)), core=0xFFF & ~8)
    report = made.run()
    assert report.seconds < 3.0
    assert made.frames[1, wire.Heartbeat] < 20 * (MEMBERS - 1)
