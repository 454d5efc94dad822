"""Whether a run has more peers than fit into one group: those in different groups cannot hold one state."""

from __future__ import annotations

import logging

from equipoise.averaging.outcome import Idle, Outcome, RunState

log = logging.getLogger(__name__)


class Crowd:
    """What is wrong with how many there are.

    Attributes:
        told: One line; empty as long as nothing is.
    """

    def __init__(self, run: str, group_size: int) -> None:
        self.told = ""
        self._run = run
        self._group_size = group_size

    def look(self, outcome: Outcome, state: RunState) -> None:
        """Say it where some cannot have been in the group: those who are make another state of it, and so on."""
        others = missing(outcome, state)
        full = len(outcome.group) >= self._group_size
        told = crowd_told(len(outcome.group) + others, self._group_size) if full and others else ""
        if told and not self.told:
            log.warning("run %s: %s", self._run, told)
        self.told = told


def missing(outcome: Outcome, state: RunState) -> int:
    """How many of the peers that are known were not in a round's group."""
    return max(state.peers + 1 - len(outcome.group), 0) if isinstance(state, Idle) else 0


def crowd_told(peers: int, most: int) -> str:
    """What is wrong with so many, one line."""
    return (
        f"this run has {peers} peers and groups of at most {most}: they cannot hold one state; "
        f"join with group_size >= {peers}"
    )
