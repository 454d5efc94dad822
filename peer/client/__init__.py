"""The side of the training script: runs, their tensors, and the connection to the daemon."""
