"""The one gate of a daemon: every way in is registered through it, and every way out presents this peer's token first.

A stranger may make one call, the presentation: its token crosses, of fixed size, and is answered with this peer's own
token only if it is good. The answer also holds a cookie, which opens the port of direct channels, where libp2p proves
nobody's PeerID: encrypted for this process alone, it names the peer that it was made for. A swarm without a key, an
open one, has the same gate with everything open.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import struct
import time
from collections.abc import Awaitable, Callable, Iterable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from equipoise.dht.admission import (
    MAX_ADMITTED,
    MAX_TOKEN_BYTES,
    UNPRESENTED,
    Admission,
    Refused,
    Revocations,
    Role,
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
COOKIE_BYTES = 64

_OWN = struct.Struct(f"!QH{MAX_TOKEN_BYTES}s")
"""The number of the newest list of the revoked, and a token."""
_NO = b"refused: "
"""Begins the answer to a token that is refused; the number of a list never begins so."""
_NONCE_BYTES = 12
_PLAIN_BYTES = _NONCE_BYTES + 32 + 16

CallHandler = Callable[[str, bytes], Awaitable[bytes]]

_log = logging.getLogger(__name__)


class Gate:
    """Admits peers, and presents this peer to others; does neither without an `admission`.

    Attributes:
        ways: Names of the calls and protocols that are registered through it.
        call: Calls a peer through libp2p: PeerID, name, request, seconds.
        reach: Connects to a peer, or raises ConnectionError.
        host: Tells the IP address that a peer's connection comes from.
        on_expelled: Called with the PeerIDs of peers whose tokens have ended or were revoked.
        keep: Called with each new list of the revoked.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission = admission
        self.ways: set[str] = set()
        self.call: Callable[[str, str, bytes, float], Awaitable[bytes]]
        self.reach: Callable[[str], Awaitable[None]]
        self.host: Callable[[str], Awaitable[str]]
        self.on_expelled: Callable[[list[str]], None] = lambda peers: None
        self.keep: Callable[[bytes], None] = lambda data: None
        self.swarm = b"" if admission is None else admission.token.swarm
        self._secret = AESGCM(os.urandom(32))
        self._cookies: LruDict[str, bytes] = LruDict(MAX_ADMITTED)
        self._presenting: dict[str, asyncio.Task[ConnectionError | None]] = {}
        self.tasks = TaskSet()

    def scoped(self, name: str) -> str:
        """Return the name of a call or protocol in this swarm, by which no other swarm knows it."""
        foreign = not self.swarm or name.startswith(FOREIGN)
        return name if foreign else f"{name}/{hashlib.sha256(self.swarm).hexdigest()[:16]}"

    def check(self, peer: str) -> None:
        """Raise Refused unless `peer` is admitted."""
        if self.admission is not None:
            self.admission.check(peer, time.time())

    def role(self, peer: str) -> Role:
        """Return the role of an admitted peer; that of a peer that is not admitted yet is judged by those it meets."""
        token = None if self.admission is None else self.admission.token_of(peer)
        return "trainer" if token is None else token.role

    def guarded(self, handlers: dict[str, CallHandler]) -> dict[str, CallHandler]:
        """Return the handlers of all calls under their names in this swarm, each behind the check but one."""

        def behind(handler: CallHandler) -> CallHandler:
            async def handle(peer: str, request: bytes) -> bytes:
                self.check(peer)
                return await handler(peer, request)

            return handle

        self.ways.update(handlers)
        if self.admission is None:
            return handlers
        self.ways.update((PRESENT, REVOKE))
        found = {self.scoped(name): behind(one) for name, one in {**handlers, REVOKE: self._heard}.items()}
        return {**found, self.scoped(PRESENT): self._presented}

    async def present(self, peer: str) -> None:
        """See to it that this peer and `peer` have admitted each other; raises ConnectionError."""
        if self.admission is None:
            return
        if peer not in self._cookies:
            task = self._presenting.get(peer)
            if task is None:
                task = self._presenting[peer] = self.tasks.spawn(self._present(peer))
                task.add_done_callback(lambda _: self._presenting.pop(peer, None))
            if (error := await asyncio.shield(task)) is not None:
                raise error.with_traceback(None)
        self.check(peer)

    def forget(self, peer: str) -> None:
        """Present this peer again before it speaks to `peer`, which was started again, it seems."""
        self._cookies.pop(peer, None)

    def lock(self, peer: str, opening: bytes) -> bytes:
        """Return the first bytes of a direct connection to `peer`: `opening`, and its cookie in place of PeerIDs."""
        if self.admission is None:
            return opening
        return self._magic(opening) + opening[4:6] + self._cookies.get(peer, b"").ljust(COOKIE_BYTES, b"\0")

    def unlock(self, own: str, opening: bytes, plain: Iterable[bytes]) -> bytes:
        """Return what `lock` was given; `plain` are the beginnings that it may have. Raises Refused."""
        if self.admission is None:
            return opening
        nonce, sealed = opening[6 : 6 + _NONCE_BYTES], opening[6 + _NONCE_BYTES : 6 + _PLAIN_BYTES]
        try:
            member = self._secret.decrypt(nonce, sealed, self.swarm)
        except InvalidTag:
            raise Refused(UNPRESENTED) from None
        self.check(peer_of(member))
        for one in plain:
            if self._magic(one) == opening[:4]:
                return one[:4] + opening[4:6] + member + public_key_of(own)
        raise Refused("it does not begin as a direct connection of this swarm does")

    def adopt(self, data: bytes) -> None:
        """Take a list of the revoked, if it is newer: part from them, pass it on. Raises Refused if it is forged."""
        admission = self.admission
        assert admission is not None, "an open swarm has no such call"
        if admission.revocations.encode() == data:
            return
        news = Revocations.decode(data, self.swarm)
        if news.rank <= admission.revocations.rank:
            return
        admission.revocations = news
        self.keep(data)
        self.expel()
        for peer in list(self._cookies):
            self.tasks.spawn(self._tell(peer))

    def expel(self) -> None:
        """Part from the peers whose tokens have ended or were revoked."""
        if self.admission is not None and (out := self.admission.expel(time.time())):
            for peer in out:
                self.forget(peer)
                _log.info("%s is not admitted any more", peer)
            self.on_expelled(out)

    def _magic(self, opening: bytes) -> bytes:
        return hashlib.sha256(self.swarm + opening[:4]).digest()[:4]

    def _own(self) -> bytes:
        assert self.admission is not None, "only a private swarm presents"
        token = self.admission.token.encode()
        return _OWN.pack(self.admission.revocations.number, len(token), token)

    async def _presented(self, peer: str, request: bytes) -> bytes:
        """The one call of strangers."""
        admission = self.admission
        assert admission is not None, "only a private swarm has this call"
        try:
            number, token = _opened(request)
            admission.admit_from(await self.host(peer), peer, token, time.time(), time.monotonic())
        except Refused as refusal:
            _log.info("%s is not admitted: %s", peer, refusal)
            return _NO + str(refusal).encode()
        nonce = os.urandom(_NONCE_BYTES)
        cookie = nonce + self._secret.encrypt(nonce, public_key_of(peer), self.swarm)
        newer = admission.revocations.encode() if admission.revocations.number > number else b""
        return self._own() + cookie.ljust(COOKIE_BYTES, b"\0") + newer

    async def _present(self, peer: str) -> ConnectionError | None:
        """Present this peer; return why they have not admitted each other, if so."""
        try:
            async with asyncio.timeout(PRESENT_SECONDS):
                await self.reach(peer)
                answer = await self.call(peer, self.scoped(PRESENT), self._own(), PRESENT_SECONDS)
            self._take(peer, answer)
        except TimeoutError:
            return ConnectionError(f"{peer} does not answer within {PRESENT_SECONDS:.0f} s")
        except ConnectionError as error:
            foreign = "not supported" in str(error)
            return Refused("it is no member of this swarm") if foreign else error
        return None

    def _take(self, peer: str, answer: bytes) -> None:
        admission = self.admission
        assert admission is not None, "only a private swarm presents"
        if answer.startswith(_NO):
            raise Refused(printable(answer[len(_NO) :].decode(errors="replace")))
        number, token = _opened(answer[: _OWN.size])
        admission.admit(peer, token, time.time())
        self._cookies[peer] = answer[_OWN.size : _OWN.size + COOKIE_BYTES]
        if newer := answer[_OWN.size + COOKIE_BYTES :]:
            self.adopt(newer)
        elif number < admission.revocations.number:
            self.tasks.spawn(self._tell(peer))

    async def _heard(self, peer: str, data: bytes) -> bytes:
        self.adopt(data)
        return b""

    async def _tell(self, peer: str) -> None:
        assert self.admission is not None, "only a private swarm revokes"
        try:
            await self.present(peer)
            await self.call(peer, self.scoped(REVOKE), self.admission.revocations.encode(), PRESENT_SECONDS)
        except ConnectionError as error:
            _log.debug("%s was not told who is revoked: %s", peer, error)


def _opened(data: bytes) -> tuple[int, bytes]:
    """Return the number and the token of a presentation; raises Refused if it has not its size."""
    if len(data) != _OWN.size:
        raise Refused(f"expected a presentation of {_OWN.size} bytes, got {len(data)}")
    number, size, token = _OWN.unpack(data)
    return number, token[:size]
