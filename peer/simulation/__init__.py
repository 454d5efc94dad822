"""A whole swarm in one process: `simulate` runs a training script once for each peer, in virtual time.

`partition` deals a data set out to the peers.

    def work(peer, index):
        with peer.join("digits", model, strategy="federated:fraction=0.1") as run:
            return Federated(run, fit, rounds=20).run()

    results = simulate(work, peers=100)

Rounds encode, reduce and draw with the program's own code, and training loops are the program's own. Only the daemons
are simulated: they know at once what real ones learn by messages, and no byte travels.
"""

from equipoise.peer.simulation.link import SimulatedPeer, simulate
from equipoise.peer.simulation.split import partition
from equipoise.peer.simulation.virtual_time import SimulationError

__all__ = ["SimulatedPeer", "SimulationError", "partition", "simulate"]
