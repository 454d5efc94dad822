"""A deterministic simulator: the real machines under a virtual clock. Only tests and scripts import it."""
