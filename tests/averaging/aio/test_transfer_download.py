"""The driver of one download, by itself: whom it asks where the directory shows more than it could ever need."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

from equipoise.averaging.aio.donor import TRANSFER_FRAME
from equipoise.averaging.aio.sessions import Sessions
from equipoise.averaging.aio.transfer import MAX_DONORS, Download
from equipoise.averaging.replication.answers import Request, Wish
from equipoise.averaging.replication.messages import Ask, decode
from equipoise.averaging.replication.transfer_events import Withdrew
from fakes.transfer import RUN, SPEC, TICKET


class Wire:
    """Takes note of what sessions are asked to do."""

    def __init__(self) -> None:
        self.admitted: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()

    def admit(self, peer: str, credential: bytes) -> bool:
        self.admitted[peer] += 1
        return True

    def post(self, peer: str, header: bytes) -> None:
        assert header[:1] == TRANSFER_FRAME
        self.asked[peer] += isinstance(decode(header[1:]), Ask)


def no_room(size: int) -> memoryview:
    raise ValueError("no memory")


async def test_a_flooded_directory_has_no_more_peers_dialled_than_a_group_has() -> None:
    wire = Wire()
    download = Download(Request(RUN, SPEC, TICKET, Wish(0, 1)), cast(Sessions, wire), 60.0, no_room)
    names = {f"peer{index}": b"credential" for index in range(1000)}
    download.see(names)
    download.see({**{f"flood{index}": b"credential" for index in range(1000)}, **names})
    download.driver.tell(Withdrew("enough"))
    assert len(wire.asked) == len(wire.admitted) == MAX_DONORS
    assert set(wire.admitted.values()) == {1}
    await asyncio.wait_for(download.ended, 1.0)
