"""Who may connect: peers that were admitted, each with its one certificate.

Members of this peer's rounds are, and peers of its runs that ask for a state or are asked for one. An admission is to
the daemon, not to one round, and is not taken back when that ends: the next one is seconds away, and the channel is
kept for it. It ends with the credential, or when `MAX_ADMITTED` others have come since.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from OpenSSL import SSL

from equipoise.dht.direct.certificate import OwnCertificate
from equipoise.dht.direct.contexts import make_context
from equipoise.dht.direct.credential import Credential, parse
from equipoise.dht.direct.preface import fingerprint_of
from equipoise.dht.direct.refusals import Refused

MAX_ADMITTED = 1024
"""Members of the rounds of some hours; the least recently admitted is forgotten. Contexts take some 30 KB each."""
MAX_VERIFIED = 1024
"""Credentials remembered as genuine: a look-up instead of two signatures (0.3 ms)."""


@dataclass
class Admitted:
    """One peer that may connect.

    Attributes:
        credential: The latest that it was admitted with.
        fingerprint: Of the certificate in it.
    """

    credential: Credential
    fingerprint: bytes
    _contexts: dict[tuple[bytes, bool], SSL.Context] = field(default_factory=dict)

    def context(self, own: OwnCertificate, *, server: bool) -> SSL.Context:
        """Return a context that trusts this peer only, made at first use."""
        key = (own.der, server)
        if key not in self._contexts:
            self._contexts = {one: kept for one, kept in self._contexts.items() if one[0] == own.der}
            self._contexts[key] = make_context(own, self.credential.certificate, server=server)
        return self._contexts[key]


class AdmittedPeers:
    """The peers that were admitted, the least recent forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` tells the swarm's time, seconds since 1970, by which credentials expire."""
        self._clock = clock
        self._peers: OrderedDict[str, Admitted] = OrderedDict()
        self._verified: OrderedDict[tuple[str, bytes], Credential] = OrderedDict()
        self._expecting: dict[str, set[asyncio.Future[None]]] = {}

    def get(self, peer: str) -> Admitted | None:
        """Return what is known of `peer` if it was admitted."""
        return self._peers.get(peer)

    def verify(self, peer: str, data: bytes) -> Credential:
        """Return the credential in `data`, remembered as genuine.

        Raises:
            CredentialError: It is not, or has expired.
        """
        key, now = (peer, bytes(data)), self._clock()
        found = self._verified.get(key)
        if found is None:
            found = self._verified[key] = parse(peer, key[1], now)
            if len(self._verified) > MAX_VERIFIED:
                self._verified.popitem(last=False)
        found.check(now)
        self._verified.move_to_end(key)
        return found

    def admit(self, peer: str, data: bytes) -> None:
        """Accept `peer` with this credential from now on.

        Raises:
            CredentialError: It is not genuine, or has expired.
        """
        credential = self.verify(peer, data)
        known = self._peers.get(peer)
        if known is None or known.credential.certificate != credential.certificate:
            self._peers[peer] = Admitted(credential, fingerprint_of(credential.certificate))
        else:
            known.credential = credential
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_ADMITTED:
            self._peers.popitem(last=False)
        for waiter in self._expecting.pop(peer, ()):
            if not waiter.done():
                waiter.set_result(None)

    def current(self, peer: str) -> Admitted:
        """Return what is known of `peer`.

        Raises:
            Refused: It was not admitted, or its credential has expired.
        """
        found = self._peers.get(peer)
        if found is None:
            raise Refused("not a member", f"{peer} is in no group with this peer")
        if self._clock() >= found.credential.expires:
            raise Refused("expired", f"the credential of {peer} has expired")
        return found

    async def expect(self, peer: str, fingerprint: bytes, seconds: float) -> Admitted:
        """Return what is known of `peer`, waiting until it is admitted with the certificate that it claims to have.

        A peer may be faster than the news that it is a member, or, after a restart, that its certificate is another.

        Raises:
            Refused: It is not admitted in time, with another certificate, or its credential has expired.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while not self._knows(peer, fingerprint):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not await self._news_of(peer, left):
                break
        found = self.current(peer)
        if found.fingerprint != fingerprint:
            raise Refused("impostor", f"it has another certificate than {peer}")
        return found

    def _knows(self, peer: str, fingerprint: bytes) -> bool:
        found = self._peers.get(peer)
        return found is not None and found.fingerprint == fingerprint

    async def _news_of(self, peer: str, seconds: float) -> bool:
        """Wait for the next admission of `peer`; False if there is none in time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expecting.setdefault(peer, set()).add(waiter)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=seconds)
            return bool(done)
        finally:
            waiters = self._expecting.get(peer, set())
            waiters.discard(waiter)
            if not waiters:
                self._expecting.pop(peer, None)
