"""Training with the swarm in others' training loops, and curves of it.

`huggingface` has a `TrainerCallback`, `lightning` a `Callback`, `accelerate` a function for prepared optimizers: each
module needs the library that it is named after. `TensorBoard` and `WandB` write a run's numbers as curves.
"""

from equipoise.peer.training.adapters.curves import TensorBoard, WandB

__all__ = ["TensorBoard", "WandB"]
