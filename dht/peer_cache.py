"""A daemon's memory over restarts: the number of its starts, its ports, and the addresses of good peers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec

from equipoise.dht.address import well_formed
from equipoise.dht.identity import write_private
from equipoise.dht.records import Addresses
from equipoise.dht.sanitize import read_regular
from equipoise.limits import LruDict

MEMORY_FILE = "swarm.json"
MAX_FILE_BYTES = 256 * 1024
MAX_PEERS = 32
"""Most peers remembered: any one of them leads back into the swarm."""
WAYS_BACK = 4
"""Most peers that are written down as soon as they are met; further ones wait for `save`."""
MAX_STARTS = 2**22
"""Sequences are `starts << 40 | count`, below 2**63."""

_log = logging.getLogger(__name__)

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class _Content(msgspec.Struct):
    starts: int = 0
    port: Port = 0
    direct_port: Port = 0
    peers: dict[str, Addresses] = {}


_contents = msgspec.json.Decoder(_Content)


class PeerCache:
    """A small file in the daemon's home; a lost or broken one costs nothing but a slower return.

    Attributes:
        first_sequence: A sequence above all that earlier starts have used.
        ports: The ports of libp2p and of direct channels that this or earlier starts have chosen; 0 for none.
        moved: Warnings of ports that earlier starts have chosen, and this one had to leave.
        peers: Addresses of good peers, by PeerID; the least recently met is forgotten.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / MEMORY_FILE
        content = self._load()
        self._starts = (content.starts + 1) % MAX_STARTS
        self.first_sequence = self._starts << 40
        self.ports = content.port, content.direct_port
        self.moved: list[str] = []
        self.peers: LruDict[str, tuple[str, ...]] = LruDict(MAX_PEERS)
        for peer, seen in content.peers.items():
            if [address.peer for address in well_formed(seen)] == [peer] * len(seen):
                self.peers[peer] = seen
        self._saved = b""
        self.save()

    def remember(self, peer: str, addresses: tuple[str, ...]) -> None:
        """Keep where `peer` was last met."""
        if addresses:
            self.peers[peer] = addresses
        if len(self.peers) <= WAYS_BACK:
            self.save()  # A daemon that is killed in the next moment returns by it.

    def choose(self, port: int, direct_port: int) -> None:
        """Keep the ports that this start has chosen, 0 where it was given one."""
        self.moved = [
            f"port {before} is used by another program; this daemon listens on port {now} from now on"
            for before, now in zip(self.ports, (port, direct_port), strict=True)
            if before and now and before != now
        ]
        self.ports = port or self.ports[0], direct_port or self.ports[1]
        self.save()

    def save(self) -> None:
        """Write the file if anything has changed."""
        data = msgspec.json.encode(_Content(self._starts, *self.ports, dict(self.peers)))
        if data == self._saved:
            return
        try:
            write_private(self._path, data)
            self._saved = data
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error)

    def _load(self) -> _Content:
        try:
            return _contents.decode(read_regular(self._path, MAX_FILE_BYTES))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if not isinstance(error, FileNotFoundError):
                _log.warning("%s is not used: %s", self._path, error)
            return _Content()
