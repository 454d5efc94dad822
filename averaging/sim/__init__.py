"""A deterministic simulator of rounds: the real machines under a virtual clock."""
