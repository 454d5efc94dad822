"""The `equipoise` command line; imports neither torch nor hivemind until a verb needs them."""

from equipoise.peer.cli.program import main

__all__ = ["main"]
