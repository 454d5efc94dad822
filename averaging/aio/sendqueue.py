"""What waits to be sent to one peer: control frames first, then the bulk frames of all flows in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from equipoise.averaging.ports import Buffer

Frame = tuple[bytes, Buffer]
"""Header and body."""

Bulk = Callable[[], Frame | None]
"""Makes a bulk frame when its turn has come; None if it is no longer wanted."""


class SendQueue:
    """A queue in which a heartbeat waits behind no part, and a large round behind no more than it must.

    Attributes:
        control: Headers of control frames, in order.
    """

    def __init__(self) -> None:
        self.control: deque[bytes] = deque()
        self._flows: OrderedDict[bytes, deque[Bulk]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.control or self._flows)

    @property
    def has_bulk(self) -> bool:
        """Whether a bulk frame waits."""
        return bool(self._flows)

    def add_bulk(self, flow: bytes, make: Bulk) -> None:
        """Queue a bulk frame; frames of one flow (a round's id) stay in order, flows take turns."""
        self._flows.setdefault(flow, deque()).append(make)

    def next_bulk(self) -> Frame | None:
        """Take the next bulk frame that is still wanted, from the flow whose turn it is."""
        while self._flows:
            flow, waiting = self._flows.popitem(last=False)
            make = waiting.popleft()
            if waiting:
                self._flows[flow] = waiting
            if frame := make():
                return frame
        return None

    def drop_bulk(self, flow: bytes | None = None) -> None:
        """Forget the bulk frames of one flow, or of all."""
        if flow is None:
            self._flows.clear()
        else:
            self._flows.pop(flow, None)
