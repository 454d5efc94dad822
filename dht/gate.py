"""The one gate of a daemon: every way in is registered through it, and every way out presents this peer's token first.

In a private swarm a stranger may make one call, the presentation: its token, of at most 400 bytes, is answered with
this peer's own token only if it is good. The answer also holds a cookie, which opens the port of direct channels, where
libp2p proves nobody's PeerID: the caller sends it there in place of the PeerIDs. The gate of an open swarm lets all in
but the banned.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from equipoise.dht.admission import (
    MAX_ADMITTED,
    MAX_LIST_BYTES,
    MAX_TOKEN_BYTES,
    UNPRESENTED,
    Admission,
    Refused,
    Revocations,
    read,
)
from equipoise.dht.identity import peer_of, public_key_of
from equipoise.dht.sanitize import printable
from equipoise.limits import LruDict
from equipoise.tasks import TaskSet

PRESENT = "equipoise.dht.present"
REVOKE = "equipoise.dht.revoke"
PRESENT_SECONDS = 3.0
"""Longest presentation, its dial included."""
FOREIGN = "/libp2p/"
"""Protocols of libp2p itself keep their names: p2pd speaks them too."""
CLEAR_BYTES = 6
"""Bytes of the opening of a direct connection before the two public keys, or the cookie."""
MAX_MET = 1024

_NO = b"refused: "
"""Begins the answer to a token that is refused; a token never begins so."""
_COOKIE_BYTES = 64
MAX_ANSWER_BYTES = MAX_TOKEN_BYTES + MAX_LIST_BYTES
answers = msgspec.msgpack.Decoder(
    tuple[bytes, Annotated[bytes, msgspec.Meta(min_length=_COOKIE_BYTES, max_length=_COOKIE_BYTES)], bytes]
)
"""Token, cookie and list of the revoked of a peer that has admitted this one."""

CallHandler = Callable[[str, bytes], Awaitable[bytes]]

_log = logging.getLogger(__name__)


class Gate:
    """Admits peers, and presents this peer to others.

    Attributes:
        admission: Decides on peers.
        met: When a round began last with each peer, on the monotonic clock. A share of what strangers may take is
            kept for these peers.
        call: Calls a peer through libp2p: PeerID, name, request, seconds.
        reach: Connects to a peer, or raises ConnectionError.
        host: Tells the block of IP addresses that a peer's connection comes from.
        on_expelled: Called with the PeerIDs of peers that are admitted no longer.
        keep: Called with each new list of the revoked.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission = admission or Admission()
        self.met: LruDict[str, float] = LruDict(MAX_MET)
        self.call: Callable[[str, str, bytes, float], Awaitable[bytes]]
        self.reach: Callable[[str], Awaitable[None]]
        self.host: Callable[[str], Awaitable[str]]
        self.on_expelled: Callable[[list[str]], None] = lambda peers: None
        self.keep: Callable[[Revocations], None] = lambda news: None
        token = self.admission.token
        self.swarm, self._token = (b"", b"") if token is None else (token.swarm, token.encode())
        self._secret = os.urandom(32)
        self._guests: LruDict[bytes, str] = LruDict(MAX_ADMITTED)
        self._cookies: LruDict[str, bytes] = LruDict(MAX_ADMITTED)
        self.tasks = TaskSet()

    def scoped(self, name: str) -> str:
        """Return the name of a call or protocol in this swarm, by which no other swarm knows it."""
        foreign = not self.swarm or name.startswith(FOREIGN)
        return name if foreign else f"{name}/{hashlib.sha256(self.swarm).hexdigest()[:16]}"

    def check(self, peer: str) -> None:
        """Raise Refused unless `peer` is admitted."""
        self.admission.check(peer, time.time())

    def bans(self, peer: str) -> bool:
        """Tell whether this daemon alone refuses `peer`."""
        return peer in self.admission.banned

    def standing(self, peer: str) -> str:
        """Return what `peer` may do in rounds: its role, or `banned`; all are trainers in an open swarm."""
        return "banned" if self.bans(peer) else self.admission.role(peer)

    @property
    def calls(self) -> dict[str, CallHandler]:
        """The calls that it answers itself."""
        return {PRESENT: self._presented, REVOKE: self._heard} if self.swarm else {}

    async def present(self, peer: str) -> None:
        """See to it that this peer and `peer` have admitted each other; raises ConnectionError."""
        if self.swarm and peer not in self._cookies:
            try:
                async with asyncio.timeout(PRESENT_SECONDS):
                    await self.reach(peer)
                    answer = await self.call(peer, PRESENT, self._token, PRESENT_SECONDS)
                self._take(peer, answer)
            except TimeoutError:
                raise ConnectionError(f"{peer} does not answer within {PRESENT_SECONDS:.0f} s") from None
            except ConnectionError as error:
                if "not supported" in str(error):
                    raise Refused("it is no member of this swarm") from None
                raise
        self.check(peer)

    def forget(self, peer: str) -> None:
        """Present this peer again before it speaks to `peer`, which was started again, it seems."""
        self._cookies.pop(peer, None)

    def lock(self, peer: str, opening: bytes) -> bytes:
        """Return the first bytes of a direct connection to `peer`, in a private swarm without PeerIDs in the clear."""
        if not self.swarm:
            return opening
        return opening[:CLEAR_BYTES] + self._cookies.get(peer, bytes(_COOKIE_BYTES))

    def unlock(self, own: str, opening: bytes) -> bytes:
        """Return what `lock` was given, if its sender is admitted; raises Refused."""
        clear, rest = opening[:CLEAR_BYTES], opening[CLEAR_BYTES:]
        if self.swarm:
            if (guest := self._guests.get(bytes(rest))) is None:
                raise Refused(UNPRESENTED)
            rest = public_key_of(guest) + public_key_of(own)
        self.check(peer_of(rest[:32]))
        return clear + rest

    def adopt(self, data: bytes) -> None:
        """Take a list of the revoked, if it is newer: part from them, pass it on. Raises Refused if it is forged."""
        if data == self.admission.revocations.encode():
            return
        news = Revocations.decode(data, self.swarm)
        if news <= self.admission.revocations:
            return
        self.admission.revocations = news
        self.keep(news)
        self.expel()
        for peer in list(self._cookies):
            self.tasks.spawn(self._tell(peer))

    def expel(self, banned: str = "") -> None:
        """Part from the peers whose tokens have ended or were revoked, and from one that was `banned`."""
        if out := self.admission.expel(time.time()) + [banned] * bool(banned):
            for peer in out:
                self.forget(peer)
                _log.info("%s is not admitted any more", peer)
            self.on_expelled(out)

    async def _presented(self, peer: str, request: bytes) -> bytes:
        """The one call of strangers."""
        try:
            self.admission.admit(peer, request, time.time(), await self.host(peer), time.monotonic())
        except Refused as refusal:
            _log.info("%s is not admitted: %s", peer, refusal)
            return _NO + str(refusal).encode()
        cookie = hmac.digest(self._secret, peer.encode(), "sha512")
        self._guests[cookie] = peer
        return msgspec.msgpack.encode((self._token, cookie, self.admission.revocations.encode()))

    def _take(self, peer: str, answer: bytes) -> None:
        if answer.startswith(_NO):
            raise Refused(printable(answer[len(_NO) :].decode(errors="replace")))
        token, cookie, news = read(answers, answer, MAX_ANSWER_BYTES, "answer")
        self.admission.admit(peer, token, time.time())
        self._cookies[peer] = cookie
        self.adopt(news)
        if news != self.admission.revocations.encode():
            self.tasks.spawn(self._tell(peer))

    async def _heard(self, peer: str, data: bytes) -> bytes:
        self.adopt(data)
        return b""

    async def _tell(self, peer: str) -> None:
        try:
            await self.present(peer)
            news = self.admission.revocations.encode()
            await self.call(peer, REVOKE, news, PRESENT_SECONDS)
        except ConnectionError as error:
            _log.debug("%s was not told who is revoked: %s", peer, error)
