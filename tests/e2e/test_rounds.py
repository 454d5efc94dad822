"""What a round promises, held by real daemons: exactness, and what survives a fault in its midst."""

from __future__ import annotations

import pytest

from e2e.fleet import Fleet, normal
from e2e.swarm import Swarm

pytestmark = pytest.mark.timeout(300)

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]

MEGABYTES_64 = 16_000_000


@pytest.mark.parametrize(
    "members", [2, 4, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_rounds_are_exact_and_equal_on_all_members(swarm: Swarm, members: int) -> None:
    daemons = swarm.daemons(members, args=LISTEN)
    weights = [1.0 + 2.5 * index for index in range(members)]
    for codec, bound in (("fp32", 1e-6), ("int8", 0.010)):
        with Fleet(daemons, normal(members, 1_000_000), codec=codec) as fleet:
            outcomes = [pending.result() for pending in fleet.start(weights)]
            assert all(len(outcome.contributors) == members for outcome in outcomes), outcomes
            print(f"{members} members, {codec}: off by {fleet.check(dict(enumerate(outcomes)), bound):.3g}")


@pytest.mark.parametrize("fault", ["pause", pytest.param("kill", marks=pytest.mark.slow)])
def test_survivors_of_a_fault_in_mid_round_hold_an_exact_mean(swarm: Swarm, fault: str) -> None:
    daemons = swarm.daemons(4, args=LISTEN)
    with Fleet(daemons, normal(4, MEGABYTES_64), codec="int8") as fleet:
        victim = 2
        pending = fleet.start_whole([1.0, 2.0, 3.0, 4.0], victim)
        getattr(daemons[victim], fault)()
        outcomes = {member: pending[member].result() for member in (0, 1, 3)}
        fleet.check(outcomes, 0.010)
        daemons[victim].resume()


def test_observers_and_client_mode_take_part(swarm: Swarm) -> None:
    first = swarm.daemon(args=LISTEN)
    second = swarm.daemon(join=[first.address], args=LISTEN)
    client = swarm.daemon(join=[first.address], args=["--client-mode"])
    with Fleet([first, second, client], normal(3, 100_000), codec="fp32") as fleet:
        outcomes = [pending.result() for pending in fleet.start([1.0, 0.0, 2.0])]
        assert set(outcomes[0].contributors) == {fleet.clients[0].peer_id, fleet.clients[2].peer_id}
        fleet.check(dict(enumerate(outcomes)), 1e-6)
