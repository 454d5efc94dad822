"""The program: daemon, control socket, client API and command line.

A training script needs `connect` (the daemon of this machine) or `Peer` (a daemon in its own process).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.averaging.outcome import Exchanging, Gathering, Idle, NoPeers, Outcome
    from equipoise.averaging.schema import SchemaError
    from equipoise.averaging.spec import SpecError
    from equipoise.peer.client.channels import Delivered, Delivery, Message
    from equipoise.peer.client.futures import PendingRound
    from equipoise.peer.connecting import Client, connect
    from equipoise.peer.control.messages import Progress
    from equipoise.peer.embedded import Peer
    from equipoise.peer.errors import (
        ConfigError,
        DaemonLost,
        EquipoiseError,
        Lost,
        NoDaemon,
        Refused,
        RoundPending,
        Undecided,
    )
    from equipoise.peer.run import Run
    from equipoise.peer.status import Status

_HOMES = (
    *("peer.errors", "averaging.outcome", "averaging.schema", "averaging.spec", "peer.status"),
    *("peer.control.messages", "peer.client.futures", "peer.client.channels"),
    *("peer.run", "peer.connecting", "peer.embedded"),
)
"""Modules of the names, those first that load fast."""

__all__ = [
    "Client",
    "ConfigError",
    "DaemonLost",
    "Delivered",
    "Delivery",
    "EquipoiseError",
    "Exchanging",
    "Gathering",
    "Idle",
    "Lost",
    "Message",
    "NoDaemon",
    "NoPeers",
    "Outcome",
    "Peer",
    "PendingRound",
    "Progress",
    "Refused",
    "RoundPending",
    "Run",
    "SchemaError",
    "SpecError",
    "Status",
    "Undecided",
    "connect",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # The command line imports this package and must not wait for torch.
    homes = _HOMES if name in __all__ else ()
    found = (vars(importlib.import_module(f"equipoise.{home}")) for home in homes)
    for names in found:
        if name in names:
            return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
