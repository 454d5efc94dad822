"""Training together: any torch optimizer by the whole swarm's batches, or local steps with an exchange now and then.

`Run.optimizer` makes a `SwarmOptimizer`. `LocalSGD`, `DiLoCo` and `Gossip` are context managers around your own loop.
`Federated` calls your functions, round by round. `Population` has peers copy the best of them. `Pipeline` trains
a model of which each peer has a part. `Shared` has peers hold rows of tables for each other. These are not imported
with this package:

    from equipoise.peer.training.adapters.huggingface import SwarmCallback  # for transformers' Trainer
    from equipoise.peer.training.adapters.lightning import SwarmCallback  # for Lightning's Trainer
    from equipoise.peer.training.adapters.accelerate import step_with_swarm  # for a loop with Accelerate
    from equipoise.peer.training.ddp import SharedOptimizer  # one machine with several GPUs is one peer
    from equipoise.peer.simulation import simulate, partition  # many peers in one process, in virtual time
"""

from equipoise.averaging.outer import Average, Nesterov
from equipoise.averaging.population import Choice, Log, Uniform
from equipoise.averaging.state import StateId
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.training.checkpoint import Checkpoints
from equipoise.peer.training.checkpoint_files import CheckpointError
from equipoise.peer.training.dcp import SwarmState
from equipoise.peer.training.federated import Federated, Task
from equipoise.peer.training.gossip import Gossip
from equipoise.peer.training.history import History, Record
from equipoise.peer.training.image import Stateful
from equipoise.peer.training.local import DiLoCo, LocalSGD, SparseLoCo
from equipoise.peer.training.optimizer import SwarmOptimizer
from equipoise.peer.training.options import FederatedOptions, LocalOptions, Options
from equipoise.peer.training.pipeline import Pipeline
from equipoise.peer.training.population import Population
from equipoise.peer.training.shared import Shared
from equipoise.peer.training.shares import Shares

__all__ = [
    "Average",
    "CheckpointError",
    "Checkpoints",
    "Choice",
    "DiLoCo",
    "Federated",
    "FederatedOptions",
    "Gossip",
    "History",
    "ImageError",
    "LocalOptions",
    "LocalSGD",
    "Log",
    "Nesterov",
    "Options",
    "Pipeline",
    "Population",
    "Record",
    "Shared",
    "Shares",
    "SparseLoCo",
    "StateId",
    "Stateful",
    "SwarmOptimizer",
    "SwarmState",
    "Task",
    "Uniform",
]
