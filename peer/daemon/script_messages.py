"""The messages of one client's script in one run, between its control socket and the other peers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from equipoise.peer.control.messages import Arrival, JoinRun, ReceiveMessage, SendMessage
from equipoise.peer.errors import Refused
from equipoise.peer.shared_memory import Piece, Region

if TYPE_CHECKING:
    from equipoise.averaging.aio.router import Router

MAX_RECEIVING = 16
"""Most calls of a script that wait for a message at once: they hold requests that others need."""


class ScriptMessages:
    """Hands messages over; `mates` are the peers to send to, or those that may send here if called with True."""

    def __init__(
        self,
        router: Router,
        joined: JoinRun,
        region: Region,
        mates: Callable[[bool], Awaitable[Mapping[str, bytes]]],
    ) -> None:
        self._router, self._region = router, region
        self._receiving = 0
        self._lent: dict[int, Piece] = {}
        self.messenger = router.exchange(joined.run, joined.mailbox, mates, region.received.take)

    def send(self, request: SendMessage) -> None:
        """Send a message; raises ValueError if too many wait for the receiver, or it is not in the memory."""
        content = self._region.sent.piece(request.at, request.size)
        self.messenger.send(request.to, request.topic, content.data, request.added)

    async def receive(self, request: ReceiveMessage) -> Arrival | None:
        """Take a message; raises Refused if too many calls wait already."""
        for at in request.back:
            self._lent.pop(at, None)
        if self._receiving >= MAX_RECEIVING:
            raise Refused(f"{MAX_RECEIVING} calls wait for messages already", "use fewer threads")
        self._receiving += 1
        try:
            got = await self.messenger.receive(request.topic, request.timeout)
        finally:
            self._receiving -= 1
        if got is None:
            return None
        (peer, part, piece), past = got
        assert isinstance(piece, Piece), "it was taken for the message"
        self._lent[piece.at] = piece
        return Arrival(peer, part.sender, past, piece.at, part.size)

    def close(self, reason: str, final: bool) -> None:
        """End; see `Messenger.close`."""
        self._router.hang_up(self.messenger, reason, final)
