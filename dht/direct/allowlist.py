"""The peers that may connect: admitted peers, each with its one certificate.

Members of this peer's rounds are admitted, and peers of its runs that ask for a state or are asked for one. An
admission is to the daemon, not to one round. It does not end with the round: the next round is seconds away, and its
members keep the channel. It ends with the credential, or when `MAX_ADMITTED` others have come since.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from equipoise.dht.direct.credential import Credential, fingerprint_of, parse
from equipoise.dht.direct.errors import Refused
from equipoise.dht.limits import LruDict

MAX_ADMITTED = 1024
"""Most peers admitted: the members of some hours' rounds. The oldest is forgotten."""


class Allowlist(LruDict[str, Credential]):
    """The latest credentials of the peers that were admitted, by PeerID."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Credentials expire by `clock`, the swarm's time in seconds since 1970."""
        super().__init__(MAX_ADMITTED)
        self._clock = clock
        self._news = asyncio.Event()

    def admit(self, peer: str, data: bytes) -> None:
        """Accept `peer` with this credential from now on; raises Refused if the credential is false or has expired."""
        known = self.get(peer)
        if known is not None and known.signed == data:  # Its two signatures (0.3 ms) were verified before.
            known.check(self._clock())
        else:
            known = parse(peer, bytes(data), self._clock())
        self[peer] = known
        self._news.set()
        self._news = asyncio.Event()

    def current(self, peer: str) -> Credential:
        """Return the credential of `peer`; raises Refused if it was not admitted, or its credential has expired."""
        found = self.get(peer)
        if found is None:
            raise Refused("not a member", f"{peer} is in no group with this peer")
        found.check(self._clock())
        return found

    async def expect(self, peer: str, fingerprint: bytes, seconds: float) -> Credential:
        """Return the credential of `peer`; wait until it is admitted with the certificate that it claims to have.

        A peer may come before the news that it is a member or, after a restart, that it has a new certificate. Raises
        Refused if `peer` is not admitted in time, has another certificate, or its credential has expired.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (known := self.get(peer)) is None or fingerprint_of(known.certificate) != fingerprint:
                    await self._news.wait()
        found = self.current(peer)
        if fingerprint_of(found.certificate) != fingerprint:
            raise Refused("impostor", f"it has another certificate than {peer}")
        return found
