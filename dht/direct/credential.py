"""Credentials: where a peer is reached; and the peers admitted, each with its credential's addresses.

On the wire a credential is msgpack `["host port", ...]`, best first; in client mode it is an empty list. It needs no
signature of its own: the records and joins that carry it are signed, and the handshake proves who is at an address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from equipoise.dht.address import is_host
from equipoise.dht.dialpolicy import Place
from equipoise.dht.direct.errors import Refused
from equipoise.dht.sanitize import Malformed, decode
from equipoise.limits import MAX_CREDENTIAL_BYTES, LruDict

MAX_ADDRESSES = 4
"""Most addresses in a credential; of more addresses, the first count."""
MAX_ADMITTED = 1024
"""Most peers admitted: the members of some hours' rounds. The one that was admitted longest ago is forgotten."""

_decoder = msgspec.msgpack.Decoder(Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_ADDRESSES)])


def issue(addresses: Sequence[Place]) -> bytes:
    """Return a credential; leave out addresses that no peer would accept and, if not all fit, the last ones."""
    told = [f"{host} {port}" for host, port in addresses if is_host(host)][:MAX_ADDRESSES]
    while len(data := msgspec.msgpack.encode(told)) > MAX_CREDENTIAL_BYTES:
        told.pop()
    return data


def parse(data: bytes) -> tuple[Place, ...]:
    """Return the addresses in a credential; raises Refused if it is malformed."""
    try:
        told = decode(_decoder, data, MAX_CREDENTIAL_BYTES, "credential")
    except Malformed as error:
        raise Refused("malformed credential", str(error)) from None
    return tuple(_address(text) for text in told)


def _address(text: str) -> Place:
    host, _, port = text.partition(" ")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not (is_host(host) and digits and 1 <= int(port) <= 65535):
        raise Refused("malformed credential", "expected addresses as 'host port', ports from 1 to 65535")
    return host, int(port)


class Allowlist(LruDict[str, tuple[Place, ...]]):
    """The peers that may connect, by PeerID, each with the addresses of the latest credential that came with it.

    Members of this peer's rounds are admitted, and peers of its runs that ask for a state or are asked for one. An
    admission is to the daemon, not to one round. It does not end with the round: the next round is seconds away, and
    its members keep the channel. It ends when `MAX_ADMITTED` others have been admitted since.
    """

    def __init__(self) -> None:
        super().__init__(MAX_ADMITTED)
        self._news = asyncio.Event()

    def admit(self, peer: str, data: bytes) -> None:
        """Accept `peer` with this credential from now on; raises Refused if the credential is malformed."""
        self[peer] = parse(data)
        self._news.set()
        self._news = asyncio.Event()

    def current(self, peer: str) -> tuple[Place, ...]:
        """Return the addresses of `peer`; raises Refused if it was not admitted."""
        if peer not in self:
            raise Refused("not a member", f"{peer} is in no group with this peer")
        return self[peer]

    async def expect(self, peer: str, seconds: float) -> None:
        """Wait until `peer` is admitted: it may come before the news that it is a member.

        Raises Refused if it is not admitted in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while peer not in self:
                    await self._news.wait()
        self.current(peer)
