"""`StateId`: the name of a state of a replicated training, and the rule by which a group chooses its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec

MAX_EPOCH = 2**53
"""Highest epoch, which every msgpack reader can represent: 285,000 years at a thousand updates a second."""


class StateId(msgspec.Struct, frozen=True, array_like=True):
    """Names a state: equal ids mean equal parameters, optimizer state and all else that peers hold alike.

    The types bound what another process may send.

    Attributes:
        epoch: Updates applied, 0 to `MAX_EPOCH`.
        lineage: 64 hexadecimal characters: a running digest over the first parameters and everything applied since.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    lineage: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


def group_state(states: Iterable[StateId], strangers: Iterable[StateId] = ()) -> StateId | None:
    """The most common of the claimed states; of equally common ones, that of the higher epoch, then larger lineage.

    A trained state comes before any untrained one: newcomers begin at epoch 0, and no number of them outvotes a trained
    state. All peers choose alike among the same states, in any order. None without claims. Claims of `strangers` decide
    only between equally common states: a peer that is alone with its state so follows a peer that has others beside it.
    """
    counts, beside = Counter(states), Counter(strangers)
    return max(
        counts,
        key=lambda state: (state.epoch > 0, counts[state], beside[state], state.epoch, state.lineage),
        default=None,
    )
