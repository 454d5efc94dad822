"""What a person does next where an address to join through leads nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.dht.state import AddressState, BootstrapStatus
from equipoise.peer.errors import EquipoiseError, Refused, Unreached

_COMPARE = "compare host and port with what the daemon there prints"

NEXT_STEPS: dict[AddressState, str] = {
    "refused": f"start the daemon there, or {_COMPARE}",
    "timeout": f"{_COMPARE}, and have its firewall let the port through",
    "unresolved": "correct the host name, or give an IP address",
    "no network": "connect this machine to a network",
    "wrong peer": "copy the address that the daemon there prints now",
    "failed": _COMPARE,
}
"""By what came of an address; the reasons of the other states say what to do themselves."""


def advised(reason: str, entries: Sequence[BootstrapStatus]) -> str:
    """`reason` and, if it is about one of these addresses, the next step."""
    for entry in entries:
        if reason.startswith(entry.reason) and entry.state in NEXT_STEPS:
            return f"{reason}; {NEXT_STEPS[entry.state]}"
    return reason


def failure(reason: str, entries: Sequence[BootstrapStatus]) -> EquipoiseError | None:
    """The error of a daemon that ends without having met anyone, for `reason`; None if no address has failed."""
    failed = [entry for entry in entries if entry.state not in ("trying", "connected")]
    if not failed:
        return None
    kind = Refused if all(entry.state == "other version" for entry in failed) else Unreached
    return kind(f"ended without having met another peer: {reason.replace('; trying again', '')}")
