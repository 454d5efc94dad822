"""The program: daemon, control socket, client API and command line.

A training script needs `connect` (the daemon of this machine) or `Peer` (a daemon in its own process).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.averaging.outcome import Exchanging, Gathering, Idle, NoPeers, Outcome
    from equipoise.averaging.schema import SchemaError
    from equipoise.averaging.spec import SpecError
    from equipoise.peer.client import Client, connect
    from equipoise.peer.control.messages import Progress
    from equipoise.peer.embedded import Peer
    from equipoise.peer.errors import ConfigError, DaemonLost, EquipoiseError, NoDaemon, Refused, RoundPending
    from equipoise.peer.futures import PendingRound
    from equipoise.peer.run import Run
    from equipoise.peer.status import Status

_HOMES = {
    "equipoise.averaging.outcome": ("Exchanging", "Gathering", "Idle", "NoPeers", "Outcome"),
    "equipoise.averaging.schema": ("SchemaError",),
    "equipoise.averaging.spec": ("SpecError",),
    "equipoise.peer.client": ("Client", "connect"),
    "equipoise.peer.embedded": ("Peer",),
    "equipoise.peer.errors": (
        "ConfigError",
        "DaemonLost",
        "EquipoiseError",
        "NoDaemon",
        "Refused",
        "RoundPending",
    ),
    "equipoise.peer.control.messages": ("Progress",),
    "equipoise.peer.futures": ("PendingRound",),
    "equipoise.peer.run": ("Run",),
    "equipoise.peer.status": ("Status",),
}

__all__ = [
    "Client",
    "ConfigError",
    "DaemonLost",
    "EquipoiseError",
    "Exchanging",
    "Gathering",
    "Idle",
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
    "connect",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # The command line imports this package and must not wait for torch.
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
