"""What waits to be sent to one peer: control frames first, then bulk of all rounds in turn, then what can wait."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from equipoise.averaging.ports import Buffer

Frame = tuple[bytes, Buffer]
"""Header and body."""

Bulk = Callable[[], Frame | None]
"""Makes a bulk frame when its turn has come; None if it is no longer wanted."""


class SendQueue:
    """A queue in which a heartbeat waits behind no part, a round behind no more than it must, a download behind both.

    Attributes:
        control: Headers of control frames, in order.
    """

    def __init__(self) -> None:
        self.control: deque[bytes] = deque()
        self._flows: OrderedDict[bytes, deque[Bulk]] = OrderedDict()
        self._late: OrderedDict[bytes, deque[Bulk]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.control or self._flows or self._late)

    @property
    def has_bulk(self) -> bool:
        """Whether a bulk frame waits."""
        return bool(self._flows or self._late)

    def add_bulk(self, flow: bytes, make: Bulk, late: bool = False) -> None:
        """Queue a bulk frame; those of one flow (a round's id) stay in order, flows take turns, late ones come last."""
        (self._late if late else self._flows).setdefault(flow, deque()).append(make)

    def next_bulk(self) -> Frame | None:
        """Take the next bulk frame that is still wanted, from the flow whose turn it is."""
        while flows := self._flows or self._late:
            flow, waiting = flows.popitem(last=False)
            make = waiting.popleft()
            if waiting:
                flows[flow] = waiting
            if frame := make():
                return frame
        return None

    def drop_bulk(self, flow: bytes | None = None) -> None:
        """Forget the bulk frames of one flow, or of all."""
        if flow is None:
            self._flows.clear()
            self._late.clear()
        else:
            self._flows.pop(flow, None)
            self._late.pop(flow, None)
