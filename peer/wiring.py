"""The real parts of a daemon: `equipoise.dht`'s swarm below `equipoise.averaging`'s router."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from equipoise.averaging.aio.router import Router
from equipoise.dht.direct.handshake import Layer
from equipoise.dht.identity import IDENTITY_FILE, Identity, IdentityError, verify
from equipoise.dht.p2pd import P2pdError
from equipoise.dht.swarm import Swarm, SwarmOptions
from equipoise.peer.config import Config
from equipoise.peer.errors import EquipoiseError, HomeError, unusable

SIGNATURE_DOMAIN = "averaging"
"""Keeps signatures made for rounds from being taken for signatures of records."""


class Signer:
    """The router's view of an identity."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign(self, data: bytes) -> bytes:
        """Sign with this peer's identity key."""
        return self._identity.sign(SIGNATURE_DOMAIN, data)

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        """Return whether the key behind `peer` signed `data`."""
        return verify(peer, SIGNATURE_DOMAIN, data, signature)


async def start_parts(config: Config) -> tuple[Swarm, Router]:
    """Start libp2p and put a router on it; returns without waiting for other peers.

    Raises:
        HomeError: A file of the home cannot be used: an identity file that others can read, a full disk.
        EquipoiseError: Something else of this machine prevents it: a port in use.
    """
    options = SwarmOptions(
        name=config.name,
        listen=config.listen,
        join=config.join,
        announce=config.announce,
        upnp=config.upnp,
        client_mode=config.client_mode,
        direct_listen=config.direct_listen,
        channel=cast(Layer, config.channel),
        relay=config.relay_bandwidth if config.relay else None,
    )
    try:
        swarm = Swarm(Path(config.home), options)
        await swarm.start()
    except IdentityError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno:  # Else it says itself what to do.
            raise unusable(f"use {Path(config.home) / IDENTITY_FILE}", error.__cause__) from error
        raise HomeError(str(error)) from error
    except P2pdError as error:
        raise EquipoiseError(str(error)) from error
    except OSError as error:
        raise unusable(f"use {error.filename or 'the directory for sockets'}", error) from error
    signer = Signer(swarm.identity)
    router = Router(swarm.transport, swarm.directory, signer, config.bandwidth, direct=swarm.direct)
    return swarm, router
