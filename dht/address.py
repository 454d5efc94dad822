"""Addresses: multiaddrs as people type them after `--join` and `--listen` (github.com/multiformats/multiaddr)."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

import base58

from equipoise.dht.identity import public_key_of

EXAMPLE = "/ip4/192.0.2.7/tcp/31337/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
LISTEN_EXAMPLE = "/ip4/0.0.0.0/tcp/31337"
ANNOUNCE_EXAMPLE = "/dns4/gpu.example.org/tcp/31337"

MAX_ADDRESS_CHARACTERS = 512
"""A DNS name has at most 253 characters, a PeerID 52; a relayed address holds two of each."""

MAX_HOST_CHARACTERS = 253
"""Of a DNS name."""

_HOSTNAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_HOST_PROTOCOLS = ("ip4", "ip6", "dns", "dns4", "dns6")

_CODES = {
    "ip4": b"\x04",
    "tcp": b"\x06",
    "ip6": b"\x29",
    "dns": b"\x35",
    "dns4": b"\x36",
    "dns6": b"\x37",
    "p2p": b"\xa5\x03",
    "p2p-circuit": b"\xa2\x02",
}
"""Protocol codes as varints (github.com/multiformats/multicodec, table.csv)."""


class AddressError(ValueError):
    """An address is malformed; the message says where, and shows a good one, in one line."""


@dataclass(frozen=True)
class Address:
    """Where a peer listens, and who it must turn out to be.

    Attributes:
        text: The whole multiaddr, as p2pd takes it.
        peer: PeerID expected there, in base58.
        host: IP address or DNS name of the first hop.
        port: TCP port of the first hop.
        relayed: Whether the first hop is a relay, not the peer itself.
    """

    text: str
    peer: str
    host: str
    port: int
    relayed: bool

    @property
    def first(self) -> str:
        """PeerID of the first hop: the relay's, or `peer` itself."""
        return self.text.split("/p2p/")[1].partition("/")[0]

    @property
    def transport(self) -> str:
        """The multiaddr without its last `/p2p/PeerID`."""
        return self.text.rpartition("/p2p/")[0]

    def encode_transport(self) -> bytes:
        """Return `transport` in binary; hivemind's own encoder writes PeerIDs that libp2p does not read."""
        encoded, parts = bytearray(), iter(self.transport[1:].split("/"))
        for protocol in parts:
            encoded += _CODES[protocol]
            if protocol != "p2p-circuit":
                encoded += _encode_value(protocol, next(parts))
        return bytes(encoded)


@dataclass(frozen=True)
class ListenAddress:
    """Where this daemon accepts connections.

    Attributes:
        text: The multiaddr.
        host: IP address to bind.
        port: TCP port to bind; 0 means any free one.
    """

    text: str
    host: str
    port: int


def parse_address(text: str) -> Address:
    """Parse what `--join` takes: `/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT/p2p/PEERID`, optionally through a relay.

    Raises:
        AddressError: It is malformed.
    """
    parts = _split(text, EXAMPLE)
    host, port = _first_hop(text, parts, EXAMPLE)
    rest = parts[4:]
    relayed = len(rest) == 5 and rest[0] == "p2p" and rest[2] == "p2p-circuit"
    if relayed:
        _peer(text, rest[1])
        rest = rest[3:]
    if len(rest) != 2 or rest[0] != "p2p":
        raise _error(text, "expected /p2p/PEERID at its end", EXAMPLE)
    if port == 0:
        raise _error(text, "port 0 cannot be dialled", EXAMPLE)
    return Address(text, _peer(text, rest[1]), host, port, relayed)


def parse_listen(text: str) -> ListenAddress:
    """Parse what `--listen` takes: `/ip4|ip6/ADDRESS/tcp/PORT`; raises AddressError if it is malformed."""
    parts = _split(text, LISTEN_EXAMPLE)
    host, port = _first_hop(text, parts, LISTEN_EXAMPLE)
    if parts[0] not in ("ip4", "ip6"):
        raise _error(text, "expected /ip4 or /ip6 to listen on", LISTEN_EXAMPLE)
    if len(parts) != 4:
        raise _error(text, "expected nothing after the port", LISTEN_EXAMPLE)
    return ListenAddress(text, host, port)


def parse_announce(text: str) -> str:
    """Check what `--announce` takes, `/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT`; raises AddressError if it is malformed."""
    parts = _split(text, ANNOUNCE_EXAMPLE)
    _, port = _first_hop(text, parts, ANNOUNCE_EXAMPLE)
    if port == 0:
        raise _error(text, "port 0 cannot be dialled", ANNOUNCE_EXAMPLE)
    if len(parts) != 4:
        raise _error(text, "expected nothing after the port", ANNOUNCE_EXAMPLE)
    return text


def is_relayed(text: str) -> bool:
    """Whether a multiaddr leads through a relay."""
    return "/p2p-circuit" in text


def is_ip(host: str) -> bool:
    """Whether `host` is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_host(host: str) -> bool:
    """Whether `host` is an IP address that has no zone, or may be the name of a host."""
    if is_ip(host):
        return "%" not in host
    return len(host) <= MAX_HOST_CHARACTERS and _HOSTNAME.fullmatch(host) is not None


def is_loopback(host: str) -> bool:
    """Whether `host` is an IP address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _encode_value(protocol: str, value: str) -> bytes:
    if protocol in ("ip4", "ip6"):
        return ipaddress.ip_address(value).packed
    if protocol == "tcp":
        return int(value).to_bytes(2, "big")
    data = base58.b58decode(value) if protocol == "p2p" else value.encode()
    # A host name may have 253 bytes: two bytes of varint from 128 on.
    size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return size + data


def _split(text: str, example: str) -> list[str]:
    if not text.startswith("/"):
        raise _error(text, f"expected it to start with /{_as_multiaddr(text, example)}", example)
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise _error(text, f"expected at most {MAX_ADDRESS_CHARACTERS} characters, got {len(text)}", example)
    parts = text[1:].split("/")
    if len(parts) < 4:
        raise _error(text, "expected /ip4/ADDRESS/tcp/PORT", example)
    return parts


def _as_multiaddr(text: str, example: str) -> str:
    """How `text` is written if it is the usual HOST:PORT; empty if it is not."""
    found = re.fullmatch(r"(?P<host>[\w.-]{1,253}):(?P<port>\d{1,5})", text)
    if found is None:
        return ""
    protocol = "ip4" if re.fullmatch(r"[\d.]+", found["host"]) else "dns"
    peer = "/p2p/PEERID" if "/p2p/" in example else ""
    return f", as in /{protocol}/{found['host']}/tcp/{found['port']}{peer}"


def _first_hop(text: str, parts: list[str], example: str) -> tuple[str, int]:
    protocol, host, transport, port = parts[:4]
    if protocol not in _HOST_PROTOCOLS:
        raise _error(text, f"expected one of /{', /'.join(_HOST_PROTOCOLS)} first", example)
    if transport != "tcp":
        raise _error(text, "expected /tcp after the host, the only transport", example)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise _error(text, f"expected a TCP port from 0 to 65535, got {port[:16]!r}", example)
    _check_host(text, protocol, host, example)
    return host, int(port)


def _check_host(text: str, protocol: str, host: str, example: str) -> None:
    if protocol.startswith("dns"):
        if len(host) > MAX_HOST_CHARACTERS or not _HOSTNAME.fullmatch(host):
            raise _error(text, f"expected a host name, got {host[:64]!r}", example)
        return
    version = ipaddress.IPv4Address if protocol == "ip4" else ipaddress.IPv6Address
    try:
        version(host)
    except ValueError:
        raise _error(
            text, f"expected an {protocol.replace('ip', 'IPv')} address, got {host[:64]!r}", example
        ) from None


def _peer(text: str, peer: str) -> str:
    try:
        public_key_of(peer)
    except ValueError as error:
        raise _error(text, str(error), EXAMPLE) from None
    return peer


def _error(text: str, problem: str, example: str) -> AddressError:
    return AddressError(f"malformed address {text[:200]!r}: {problem}; for example {example}")
