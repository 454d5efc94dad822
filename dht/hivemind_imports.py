"""The door to hivemind: the only module that imports it, and what this package uses of it.

Importing this takes about 2 s and pulls in torch, unless `hivemind_stub.bare_packages` was called before. hivemind logs
to stderr through a handler of its own, with tracebacks; here its records go to the logger `equipoise.dht.hivemind`, at
DEBUG, without them.
"""

from __future__ import annotations

import logging

from hivemind.dht.routing import DHTID as DHTID
from hivemind.dht.routing import RoutingTable as RoutingTable
from hivemind.dht.traverse import traverse_dht as traverse_dht
from hivemind.proto import p2pd_pb2 as p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr as Multiaddr

_log = logging.getLogger("equipoise.dht.hivemind")


class _Quiet(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _log.debug("%s", record.getMessage())


_theirs = logging.getLogger("hivemind")
_theirs.handlers[:] = [_Quiet()]
_theirs.propagate = False
# hivemind renames the level for the whole process.
logging.addLevelName(logging.WARNING, "WARNING")
