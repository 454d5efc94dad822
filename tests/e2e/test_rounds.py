"""Rounds of real daemons that a member observes, or takes part in though no peer can dial it."""

from __future__ import annotations

from e2e.fleet import Fleet, normal
from e2e.swarm import Swarm

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]


def test_observers_and_client_mode_take_part(swarm: Swarm) -> None:
    first = swarm.daemon(args=LISTEN)
    second = swarm.daemon(join=[first.address], args=LISTEN)
    client = swarm.daemon(join=[first.address], args=["--client-mode"])
    with Fleet([first, second, client], normal(3, 100_000), codec="fp32") as fleet:
        outcomes = fleet.whole([1.0, 0.0, 2.0])
        assert set(outcomes[0].contributors) == {fleet.clients[0].peer_id, fleet.clients[2].peer_id}
        fleet.check(dict(enumerate(outcomes)), 1e-6)
