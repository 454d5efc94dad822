"""A relay that cuts every circuit after so many bytes, and says nothing of it."""

from __future__ import annotations

from typing import Any

from equipoise.dht.relay import service
from equipoise.dht.streams import StreamClosed


class Cut:
    """One direction of a circuit, until it has given `left` bytes."""

    def __init__(self, source: Any, left: int) -> None:
        self._source = source
        self._left = left

    async def receive_some(self, view: memoryview) -> int:
        if not self._left:
            raise StreamClosed("it has carried the most allowed")
        count: int = await self._source.receive_some(view[: self._left])
        self._left -= count
        return count


def cutting(most: int) -> Any:
    """What to put in the place of `RelayService._pump`."""
    pump: Any = service.RelayService._pump
    return lambda self, source, sink: pump(self, Cut(source, most), sink)
