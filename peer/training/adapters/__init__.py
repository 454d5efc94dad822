"""Training with the swarm in others' training loops; each module needs the library that it is named after.

`huggingface` has a `TrainerCallback`, `lightning` a `Callback`, `accelerate` a function for prepared optimizers.
"""
