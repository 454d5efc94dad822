"""A question that anybody may ask at the door of a direct listener: where does my connection come from?

It has the size of a preface and gets a shorter answer, in the clear: nobody is told more than its own address, and
nobody trusts it further than to be found there (libp2p's identify tells observed addresses likewise; RFC 8489, STUN,
section 2).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct

from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.handshake import PREFACE_BYTES

_MAGIC = b"EQPM"
_ANSWER = struct.Struct("!4s16sH")
ANSWER_BYTES = _ANSWER.size
QUESTION = _MAGIC.ljust(PREFACE_BYTES, b"\0")
"""The first bytes of a connection that asks for its address."""


def encode_answer(host: str, port: int) -> bytes:
    """Return the `ANSWER_BYTES` that tell an asker where it comes from; IPv4 as IPv6 maps it (RFC 4291, 2.5.5.2)."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = b"\0" * 10 + b"\xff\xff" + address.packed if address.version == 4 else address.packed
    return _ANSWER.pack(_MAGIC, mapped, port)


def parse_answer(data: bytes) -> tuple[str, int]:
    """Return the address and port in an answer; raises Refused if it is none."""
    if len(data) != ANSWER_BYTES:
        raise Refused("went away", f"expected {ANSWER_BYTES} bytes, got {len(data)}")
    magic, packed, port = _ANSWER.unpack(data)
    if magic != _MAGIC or not port:
        raise Refused("malformed preface", "it does not answer as a direct listener does")
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address), port


async def ask(connection: socket.socket) -> tuple[str, int]:
    """Ask a direct listener, on a fresh connection, where that comes from; raises OSError if it does not answer."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, QUESTION)
    data = b""
    while len(data) < ANSWER_BYTES:
        got = await loop.sock_recv(connection, ANSWER_BYTES - len(data))
        if not got:
            break
        data += got
    return parse_answer(data)
