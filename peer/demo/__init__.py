"""`equipoise demo`: a whole swarm of real processes on this machine, training on real data."""
