"""The frames that wait for one peer: control frames first, then bulk of all rounds in turn, then late bulk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container

from equipoise.averaging.ports import Buffer

Frame = tuple[bytes, Buffer]
"""Header and body."""

Bulk = Callable[[], Frame | None]
"""Makes a bulk frame when its turn has come; None if it is no longer wanted."""


class _Lane:
    """Flows that share alike: next is who has had the fewest bytes (as in SFQ: Goyal, Vin and Cheng, 1996).

    Attributes:
        waiting: What each flow wants to send; a flow that wants nothing is not there.
        had: Bytes that each flow has had while others waited too, since the lane was last empty.
        reached: Virtual time: the least bytes that any waiting flow has had.
    """

    def __init__(self) -> None:
        self.waiting: dict[bytes, deque[Bulk]] = {}
        self.had: dict[bytes, int] = {}
        self.reached = 0

    def enter(self, flow: bytes) -> deque[Bulk]:
        """A flow has something to send; while it had not, it saved nothing up, and what it had before still counts."""
        if self.waiting:
            self.had[flow] = max(self.had.get(flow, 0), self.reached)
        else:
            self.had, self.reached = {flow: 0}, 0
        frames = self.waiting[flow] = deque()
        return frames

    def drop(self, flow: bytes) -> None:
        """Forget a flow."""
        self.waiting.pop(flow, None)
        self.had.pop(flow, None)


class SendQueue:
    """A queue in which a heartbeat waits behind no part, a round behind no more than it must, a download behind both.

    Attributes:
        control: Flow and header of each control frame, in order.
    """

    def __init__(self) -> None:
        self.control: deque[tuple[bytes, bytes]] = deque()
        self._rounds = _Lane()
        self._late = _Lane()

    def __bool__(self) -> bool:
        return bool(self.control or self._rounds.waiting or self._late.waiting)

    @property
    def has_bulk(self) -> bool:
        """True if a bulk frame waits."""
        return bool(self._rounds.waiting or self._late.waiting)

    def add_bulk(self, flow: bytes, make: Bulk, late: bool = False) -> None:
        """Queue a bulk frame; those of a flow (a round's id) stay in order, flows share alike, late ones come last."""
        lane = self._late if late else self._rounds
        frames = lane.waiting.get(flow)
        if frames is None:
            frames = lane.enter(flow)
        frames.append(make)

    def next_bulk(self) -> tuple[Frame, bytes, Bulk] | None:
        """Take the next bulk frame that is still wanted, from the flow that has had the fewest bytes.

        Returns:
            The frame, its flow, and what made it.
        """
        for lane in (self._rounds, self._late):
            while waiting := lane.waiting:
                shared = len(waiting) > 1
                if shared:
                    flow = min(waiting, key=lane.had.__getitem__)
                    lane.reached = lane.had[flow]
                else:
                    flow = next(iter(waiting))
                frames = waiting[flow]
                make = frames.popleft()
                if not frames:
                    del waiting[flow]
                frame = make()
                if frame is None:
                    continue
                if shared and flow in lane.had:
                    lane.had[flow] += len(frame[0]) + len(frame[1])
                return frame, flow, make
        return None

    def drop_bulk(self, flow: bytes) -> None:
        """Forget the bulk frames of a flow."""
        for lane in (self._rounds, self._late):
            lane.drop(flow)

    def drop_all_but(self, flows: Container[bytes]) -> None:
        """Forget all frames of other flows."""
        self.control = deque(one for one in self.control if one[0] in flows)
        for lane in (self._rounds, self._late):
            for flow in [flow for flow in lane.waiting if flow not in flows]:
                lane.drop(flow)
