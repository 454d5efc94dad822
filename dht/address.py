"""Addresses: multiaddrs as people type them after `--join` and `--listen` (github.com/multiformats/multiaddr)."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import base58

from equipoise.dht.identity import public_key_of

EXAMPLE = "/ip4/192.0.2.7/tcp/31337/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
LISTEN_EXAMPLE = "/ip4/0.0.0.0/tcp/31337"
ANNOUNCE_EXAMPLE = "/dns4/gpu.example.org/tcp/31337"

MAX_ADDRESS_CHARACTERS = 512
"""Longest address: a DNS name has at most 253 characters, a PeerID 52, and a relayed address holds two of each."""

MAX_HOST_CHARACTERS = 253
"""Longest DNS name."""

_HOSTNAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_HOST_CODES = {"ip4": 4, "ip6": 41, "dns": 53, "dns4": 54, "dns6": 55}
"""Codes of the protocols that an address may begin with (github.com/multiformats/multicodec, table.csv)."""
_TCP, _P2P, _CIRCUIT = b"\x06", b"\xa5\x03\x26", b"\xa2\x02"
"""Codes of tcp, p2p and p2p-circuit as varints; that of p2p with the 38 bytes that every Ed25519 PeerID takes."""


class AddressError(ValueError):
    """An address is malformed; the message says where, and shows a good one, in one line."""


@dataclass(frozen=True)
class Address:
    """An address on which a peer listens, and the peer that must be found there.

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

    def encode_transport(self) -> bytes:
        """Return it in binary, without its last `/p2p/PeerID`; hivemind writes a relay's as libp2p does not read it."""
        protocol, host = self.text.split("/")[1:3]
        is_name = not protocol.startswith("ip")
        where = varint(len(host)) + host.encode() if is_name else ipaddress.ip_address(host).packed
        relay = _P2P + base58.b58decode(self.first) + _CIRCUIT if self.relayed else b""
        return bytes([_HOST_CODES[protocol]]) + where + _TCP + self.port.to_bytes(2, "big") + relay


@dataclass(frozen=True)
class ListenAddress:
    """An address on which this daemon accepts connections: a multiaddr, its IP address, its TCP port (0: any free)."""

    text: str
    host: str
    port: int


def parse_address(text: str) -> Address:
    """Parse `/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT/p2p/PEERID`, or through a relay; raises AddressError if not so."""
    _, host, port, rest = _parse(text, EXAMPLE)
    relayed = len(rest) == 5 and rest[0] == "p2p" and rest[2] == "p2p-circuit"
    if relayed:
        _peer(text, rest[1])
        rest = rest[3:]
    if len(rest) != 2 or rest[0] != "p2p":
        raise _error(text, "expected /p2p/PEERID at its end", EXAMPLE)
    return Address(text, _peer(text, rest[1]), host, port, relayed)


def well_formed(texts: Iterable[str]) -> Iterator[Address]:
    """Parse the addresses that are not malformed."""
    for text in texts:
        with contextlib.suppress(AddressError):
            yield parse_address(text)


def parse_listen(text: str) -> ListenAddress:
    """Parse `/ip4|ip6/ADDRESS/tcp/PORT`, as for `--listen`; raises AddressError if it is malformed."""
    protocol, host, port, _ = _parse(text, LISTEN_EXAMPLE)
    if protocol not in ("ip4", "ip6"):
        raise _error(text, "expected /ip4 or /ip6 to listen on", LISTEN_EXAMPLE)
    return ListenAddress(text, host, port)


def parse_announce(text: str) -> str:
    """Check `/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT`, as for `--announce`; raises AddressError if it is malformed."""
    _parse(text, ANNOUNCE_EXAMPLE)
    return text


def varint(number: int) -> bytes:
    """Return a number as multiaddrs and libp2p's messages carry it: seven bits a byte, the lowest first."""
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + varint(number >> 7)


def is_relayed(text: str) -> bool:
    """Tell whether a multiaddr leads through a relay."""
    return "/p2p-circuit" in text


def is_ip(host: str) -> bool:
    """Tell whether `host` is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def block_of(host: str) -> str:
    """Return the addresses that one customer has: an address of IPv4 itself, of IPv6 its network of 2**64 addresses."""
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False)) if ":" in host else host


def is_host(host: str) -> bool:
    """Tell whether `host` is an IP address that has no zone, or may be the name of a host."""
    if is_ip(host):
        return "%" not in host
    return len(host) <= MAX_HOST_CHARACTERS and _HOSTNAME.fullmatch(host) is not None


def is_loopback(host: str) -> bool:
    """Tell whether `host` is an IP address that only this machine reaches."""
    return ipaddress.ip_address(host).is_loopback if is_ip(host) else host == "localhost"


def _parse(text: str, example: str) -> tuple[str, str, int, list[str]]:
    """Return protocol, host and port of the first hop, and the parts of `text` behind it."""
    if not text.startswith("/"):
        raise _error(text, f"expected it to start with /{_as_multiaddr(text, example)}", example)
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise _error(text, f"expected at most {MAX_ADDRESS_CHARACTERS} characters, got {len(text)}", example)
    parts = text[1:].split("/")
    if len(parts) < 4:
        raise _error(text, "expected /ip4/ADDRESS/tcp/PORT", example)
    protocol, host, transport, port, *rest = parts
    if protocol not in _HOST_CODES:
        raise _error(text, f"expected one of /{', /'.join(_HOST_CODES)} first", example)
    if transport != "tcp":
        raise _error(text, "expected /tcp after the host, the only transport", example)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise _error(text, f"expected a TCP port from 0 to 65535, got {port[:16]!r}", example)
    if protocol.startswith("ip"):
        # An address with a zone means another host on each machine, and resolvers fail at what a zone may hold.
        fits = is_ip(host) and "%" not in host and (":" in host) == (protocol == "ip6")
        wanted = f"an IPv{protocol[2]} address without a zone"
    else:
        wanted, fits = "a host name", len(host) <= MAX_HOST_CHARACTERS and bool(_HOSTNAME.fullmatch(host))
    if not fits:
        raise _error(text, f"expected {wanted}, got {host[:64]!r}", example)
    if int(port) == 0 and example != LISTEN_EXAMPLE:
        raise _error(text, "port 0 cannot be dialled", example)
    if rest and example != EXAMPLE:
        raise _error(text, "expected nothing after the port", example)
    return protocol, host, int(port), rest


def _as_multiaddr(text: str, example: str) -> str:
    """Return the multiaddr of `text` if that is the usual HOST:PORT; empty if it is not."""
    found = re.fullmatch(r"(?P<host>[\w.-]{1,253}):(?P<port>\d{1,5})", text)
    if found is None:
        return ""
    protocol = "ip4" if re.fullmatch(r"[\d.]+", found["host"]) else "dns"
    peer = "/p2p/PEERID" if "/p2p/" in example else ""
    return f", as in /{protocol}/{found['host']}/tcp/{found['port']}{peer}"


def _peer(text: str, peer: str) -> str:
    try:
        public_key_of(peer)
    except ValueError as error:
        raise _error(text, str(error), EXAMPLE) from None
    return peer


def _error(text: str, problem: str, example: str) -> AddressError:
    return AddressError(f"malformed address {text[:200]!r}: {problem}; for example {example}")
