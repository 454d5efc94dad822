"""Bad tokens, far more than a private swarm looks at, let no stranger in and fail no round; the test prints costs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from adversary.test_private_swarm import founder, guest, line_of
from e2e.fleet import Fleet, normal
from e2e.swarm import Swarm, eventually
from equipoise.dht.membership import Membership

RATE, SECONDS = 1000.0, 20.0
TESTS = str(Path(__file__).parents[1])


class Pace(NamedTuple):
    """Rounds of a fleet in some seconds, and the processor seconds of its daemons and of their p2pds."""

    rounds: int
    seconds: float
    daemons: float
    p2pds: float

    def beside(self, other: Pace) -> float:
        """Share of a core that went elsewhere than into rounds, which cost as much in `other`."""
        used, each = self.daemons + self.p2pds, (other.daemons + other.p2pds) / other.rounds
        return (used - each * self.rounds) / self.seconds


def used(fleet: Fleet) -> tuple[float, float]:
    total = [0.0, 0.0]
    for daemon in fleet.daemons:
        for place, processes in enumerate(([psutil.Process(daemon.pid)], daemon.descendants())):
            total[place] += sum(sum(one.cpu_times()[:2]) for one in processes)
    return total[0], total[1]


def pace(fleet: Fleet) -> Pace:
    """Rounds one after another for `SECONDS`; all of them are ok."""
    before, began, rounds = used(fleet), time.monotonic(), 0
    while time.monotonic() < began + SECONDS:
        outcomes = [pending.result() for pending in fleet.start([1.0] * len(fleet.runs))]
        assert all(outcomes), outcomes
        rounds += 1
    daemons, p2pds = (end - start for end, start in zip(used(fleet), before, strict=True))
    return Pace(rounds, time.monotonic() - began, daemons, p2pds)


@pytest.mark.slow
def test_bad_tokens_of_sixteen_peers_fail_no_round(swarm: Swarm) -> None:
    first = founder(swarm)
    second = guest(swarm, "second", line_of(first))
    key = Membership.load(first.home, "friends", time.time()).invitation.swarm.hex()
    with Fleet([first, second], normal(2, 1000), codec="fp32") as fleet:
        pace(fleet)
        before = pace(fleet)
        code = f"import sys; sys.path.insert(0, {TESTS!r}); from adversary.flood import main; main()"
        attack = swarm.script(code, first.address, key, str(RATE), str(swarm.folder))
        eventually(lambda: "begun" in attack.output, "the attackers", 120.0)
        answered = int(attack.output.split()[-1]) if attack.output.split()[1:] else 0
        during = pace(fleet)
        answered = int(attack.output.split()[-1]) - answered
        members = first.json("status")["swarm"]["members"]
        assert members == [fleet.clients[1].peer_id], "no stranger is in"
    print(
        f"{answered / during.seconds:.0f} bad tokens a second: {during.rounds} rounds in {SECONDS:g} s beside "
        f"{before.rounds}, {during.beside(before):.3f} of a core beside them; "
        f"daemons {before.daemons:.1f} and {during.daemons:.1f} s, p2pds {before.p2pds:.1f} and {during.p2pds:.1f} s"
    )
    assert answered > 0
