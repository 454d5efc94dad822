"""The real parts of a daemon: `equipoise.dht`'s swarm below `equipoise.averaging`'s router."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from equipoise.averaging.aio.router import Router
from equipoise.compression.device_reduce import DeviceReducer
from equipoise.compression.late_torch import torch
from equipoise.dht.admission import Refused
from equipoise.dht.identity import IDENTITY_FILE, Identity, IdentityError, verify
from equipoise.dht.membership import Membership
from equipoise.dht.p2pd import P2pdError
from equipoise.dht.swarm import Swarm
from equipoise.peer.config import CPU, Config, Loaded
from equipoise.peer.errors import ConfigError, EquipoiseError, HomeError, unusable

SIGNATURE_DOMAIN = "averaging"
"""Keeps signatures made for rounds from being taken for signatures of records."""


class Signer:
    """The router's view of an identity."""

    def __init__(self, identity: Identity, role: Callable[[str], str]) -> None:
        """`role` returns what a peer may do in rounds."""
        self._identity = identity
        self.role = role

    def sign(self, data: bytes) -> bytes:
        """Sign with this peer's identity key."""
        return self._identity.sign(SIGNATURE_DOMAIN, data)

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        """Return whether the key behind `peer` signed `data`."""
        return verify(peer, SIGNATURE_DOMAIN, data, signature)


def reducer_for(loaded: Loaded) -> DeviceReducer | None:
    """Return the reducer of the configured device; None for the CPU, which needs neither that nor torch.

    Raises:
        ConfigError: torch finds no such device on this machine.
    """
    name = loaded.config.device
    if name == CPU:
        return None
    index, count = torch.device(name).index or 0, torch.cuda.device_count()
    if index < count:
        return DeviceReducer(torch.device("cuda", index))
    (origin,) = (setting.origin for setting in loaded.settings if setting.key == "device")
    if torch.version.cuda is None and torch.version.hip is None:
        found, hint = f"torch {torch.__version__} is built without CUDA", "install torch for CUDA"
    else:
        found, hint = f"torch finds {count} CUDA devices", "look with nvidia-smi"
    raise ConfigError(
        f"{origin}: expected a device of this machine, got {name!r}: {found}", f"{hint}, or give {CPU}"
    )


def _membership(config: Config) -> Membership | None:
    """The membership in the private swarm that the configuration names; None for the open swarm. Raises Refused."""
    home, now = Path(config.home), time.time()
    if not config.invite:
        return Membership.load(home, config.swarm, now) if config.swarm else None
    found = Membership.redeem(home, config.invite, now)
    if (name := found.invitation.name) != config.swarm and config.swarm:
        raise Refused(f"the invitation is to swarm {name}, not to {config.swarm}; leave out one of the two")
    return found


async def start_parts(config: Config, reducer: DeviceReducer | None = None) -> tuple[Swarm, Router]:
    """Start libp2p and put a router on it; returns without waiting for other peers.

    `reducer` computes the means of rounds, if they are not to be computed on the CPU.

    Raises:
        ConfigError: The invitation is damaged, has ended, or is for another peer, or the home has no such swarm.
        HomeError: A file of the home cannot be used: an identity file that others can read, a full disk.
        EquipoiseError: Something else of this machine prevents it: a port in use.
    """
    try:
        swarm = Swarm(Path(config.home), config, _membership(config))
        await swarm.start()
    except IdentityError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno:  # Else it says itself what to do.
            raise unusable(f"use {Path(config.home) / IDENTITY_FILE}", error.__cause__) from error
        raise HomeError(str(error)) from error
    except P2pdError as error:
        raise EquipoiseError(str(error)) from error
    except Refused as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise unusable(f"use {error.filename or 'the directory for sockets'}", error) from error
    signer = Signer(swarm.identity, swarm.gate.standing)
    caps = config.upload, config.download
    router = Router(swarm.transport, swarm.directory, signer, caps, swarm.direct, reducer)
    return swarm, router
