"""What this peer shows of itself: its certificate and the credential for it, renewed before they expire."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from equipoise.dht.direct import certificate, credential
from equipoise.dht.direct.certificate import OwnCertificate, make_certificate
from equipoise.dht.identity import Identity


class Presence:
    """This peer's certificate, addresses and credential."""

    def __init__(self, identity: Identity, clock: Callable[[], float]) -> None:
        """`clock` tells the swarm's time, seconds since 1970."""
        self._identity = identity
        self._clock = clock
        self._addresses: tuple[tuple[str, int], ...] = ()
        self._certificate = make_certificate(identity.peer, clock())
        self._credential = b""
        self._renew_at = 0.0

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Where this peer's direct listener is reached, (host, port)."""
        return self._addresses

    @property
    def certificate(self) -> OwnCertificate:
        """The certificate that connections present."""
        return self._certificate

    @property
    def credential(self) -> bytes:
        """The signed credential; a new one from time to time, and when addresses change."""
        now = self._clock()
        if now >= self._renew_at or not self._credential:
            self._renew(now)
        return self._credential

    def tell(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Tell others these addresses from now on."""
        if tuple(addresses) != self._addresses:
            self._addresses = tuple(addresses)
            self._credential = b""

    def _renew(self, now: float) -> None:
        if self._certificate.expires - now < certificate.LIFE_SECONDS / 2:
            # Who knows only the old one cannot connect until the next round's joins have gone round.
            self._certificate = make_certificate(self._identity.peer, now)
        self._credential = credential.issue(self._identity, self._certificate, self._addresses, now)
        self._renew_at = now + credential.LIFE_SECONDS / 2
