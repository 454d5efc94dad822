"""`Progress`: how far peers have come towards their next step."""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """Weight accumulated towards the next step.

    Attributes:
        local: By this peer.
        swarm: By all peers of the run that answer, this one included, as far as their word counts; a little behind for
            the others.
        wanted: Epoch of which some peer wants a snapshot; None while none does. To be offered by whoever holds that
            state; a later one serves too, but then donors may differ, and the newcomer must wish again.
    """

    local: float
    swarm: float
    wanted: int | None = None
