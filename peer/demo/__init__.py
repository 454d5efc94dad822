"""`equipoise demo`: a whole swarm of real processes on this machine, training on real data."""

from __future__ import annotations

from equipoise.peer.demo.options import DemoError, DemoOptions, DemoUsageError
from equipoise.peer.demo.summary import Summary
from equipoise.peer.demo.swarm import run_demo

__all__ = ["DemoError", "DemoOptions", "DemoUsageError", "Summary", "run_demo"]
