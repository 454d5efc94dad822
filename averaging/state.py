"""`StateId`: the name of a state of a replicated training, and the rule by which a group chooses its state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import msgspec

MAX_EPOCH = 2**53
"""Highest epoch, which every msgpack reader can represent: 285,000 years at a thousand updates a second."""

_LINEAGE = re.compile(r"\A[0-9a-f]{64}\Z")


class StateId(msgspec.Struct, frozen=True, array_like=True):
    """Names a state: equal ids mean equal parameters, optimizer state and all else that peers hold alike.

    Attributes:
        epoch: Updates applied, 0 to `MAX_EPOCH`.
        lineage: 64 hexadecimal characters: a running digest over the first parameters and everything applied since.

    Raises:
        ValueError: A field is out of its range. (A message that holds such an id does not decode.)
    """

    epoch: int
    lineage: str

    def __post_init__(self) -> None:
        if type(self.epoch) is not int or not 0 <= self.epoch <= MAX_EPOCH:
            raise ValueError(f"expected an epoch of 0 to {MAX_EPOCH}, got {str(self.epoch)[:40]}")
        if not isinstance(self.lineage, str) or not _LINEAGE.match(self.lineage):
            raise ValueError(
                f"expected a lineage of 64 hexadecimal characters, got {str(self.lineage)[:80]!r}"
            )


def group_state(states: Iterable[StateId]) -> StateId | None:
    """The most common of the claimed states; of equally common ones, that of the higher epoch, then larger lineage.

    A trained state comes before any untrained one: newcomers begin at epoch 0, and no number of them outvotes a trained
    state. All peers choose alike among the same states, in any order. None without claims.
    """
    counts = Counter(states)
    return max(
        counts, key=lambda state: (state.epoch > 0, counts[state], state.epoch, state.lineage), default=None
    )
