"""The options of a member of a swarm; light, so that a command line can check them before it loads libp2p."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from equipoise.limits import MAX_BANDWIDTH, Tags

FOLDER = "swarms"
"""Where a home keeps its memberships in private swarms, a file for each, by its name."""

MAX_ADDRESSES = 64
"""More bootstrap addresses than that only slow down the start."""

Layer = Literal["aead", "tls"]
"""The carrier of frames on direct channels, once TLS has proved both PeerIDs: larger records of ours, or its own."""

DEFAULT_LAYER: Layer = "aead"
"""Layer by default: it takes a quarter of the processor time of TLS records. `aead` tells more, and when to use TLS."""

Address = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=MAX_BANDWIDTH)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


class SwarmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a member of a swarm.

    Attributes:
        name: What people call this daemon; others show it.  [default: the host's name]
        join: Addresses of daemons to join the swarm through; all are tried, again and again.
        listen: Where to listen, as /ip6/::/tcp/31337. Port 0 is any free one, and then kept.  [default: IPv4 and IPv6,
            port 31337 if it is free]
        direct_listen: Where to listen for the direct channels of rounds.  [default: port 31338 if it is free]
        announce: Where others reach this machine, as /dns4/gpu.example.org/tcp/31337, if a router forwards ports.
        upnp: Ask the router to forward a port.  [default: where this machine has private addresses only]
        channel: How direct channels encrypt.  [default: aead]
        client_mode: This machine cannot be dialled by others: it contributes and receives, and owns no share.
        upload: What this machine sends to other peers at most, as 20Mbit or 2.5MB/s; they give it a share that fits.
            [default: what the link carries]
        download: What it receives from them at most, likewise.
        relay: Relay for peers that cannot be dialled; this machine must be one that can.
        relay_bandwidth: What is relayed at most, as 10MB/s or 80Mbit/s.  [default: 12.5MB/s]
        swarm: The private swarm of this home to take part in.  [default: the open swarm]
        invite: An invitation to a private swarm, one line; the home keeps it.
        tags: What this machine is or has, as gpu: a federated run may draw only peers that carry its tags.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = ""
    join: Addresses = ()
    listen: Addresses = ()
    direct_listen: Addresses = ()
    announce: Addresses = ()
    upnp: bool | None = None
    channel: Layer = DEFAULT_LAYER
    client_mode: bool = False
    upload: Rate = 0.0
    download: Rate = 0.0
    relay: bool = False
    relay_bandwidth: Annotated[float, msgspec.Meta(gt=0)] = 12.5e6
    swarm: Annotated[str, msgspec.Meta(max_length=32, pattern=r"\A[A-Za-z0-9_.-]*\Z")] = ""
    invite: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    tags: Tags = ()


def names(home: Path) -> list[str]:
    """Return the names of the private swarms that `home` has joined."""
    return sorted(path.name for path in (home / FOLDER).glob("[!.]*"))
