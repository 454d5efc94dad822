"""The real parts of a daemon: `equipoise.dht`'s swarm below `equipoise.averaging`'s hub."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from equipoise.averaging.aio.hub import Hub
from equipoise.dht.direct.preface import Layer
from equipoise.dht.identity import Identity, IdentityError, verify
from equipoise.dht.p2pd import ListenError, P2pdError
from equipoise.dht.relay.service import RelayRules
from equipoise.dht.swarm import Swarm, SwarmOptions
from equipoise.peer.config import Config
from equipoise.peer.errors import EquipoiseError

SIGNATURE_DOMAIN = "averaging"
"""Keeps signatures made for rounds from being taken for signatures of records."""


class Signer:
    """What the hub knows of an identity."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign(self, data: bytes) -> bytes:
        """Sign with this peer's identity key."""
        return self._identity.sign(SIGNATURE_DOMAIN, data)

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        """Whether the key behind `peer` signed `data`."""
        return verify(peer, SIGNATURE_DOMAIN, data, signature)


async def start_parts(config: Config) -> tuple[Swarm, Hub]:
    """Start libp2p and put a hub on it; returns without waiting for other peers.

    Raises:
        EquipoiseError: Something of this machine prevents it: a port in use, an identity file that others can read.
    """
    options = SwarmOptions(
        listen=config.listen,
        join=config.join,
        announce=config.announce,
        upnp=config.upnp,
        client_mode=config.client_mode,
        direct_listen=config.direct_listen,
        channel=cast(Layer, config.channel),
        relay=RelayRules(config.relay_bandwidth) if config.relay else None,
    )
    try:
        swarm = Swarm(Path(config.home), options)
        await swarm.start()
    except (IdentityError, ListenError, P2pdError, OSError) as error:
        raise EquipoiseError(str(error)) from error
    hub = Hub(swarm.transport, swarm.directory, Signer(swarm.identity), config.bandwidth, direct=swarm.direct)
    return swarm, hub
