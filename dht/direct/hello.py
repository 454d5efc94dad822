"""The bytes around TLS: who dials whom, in the clear, before it; a greeting of both sides, inside it.

The server must know who dials before it can choose whom to trust. The preface is a claim and nothing more: TLS proves
it. Both messages have one size, so there are no lengths to believe.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Literal, get_args

from equipoise.dht.direct.errors import Refused
from equipoise.dht.identity import peer_of, public_key_of

Layer = Literal["tls", "aead", "plain"]
"""What carries frames once TLS has proved who is there; `plain` neither proves nor encrypts, for measurements only."""

VERSION = 2
_MAGIC = b"EQPD"
_PREFACE = struct.Struct("!4sBB32s32s32s")
PREFACE_BYTES = _PREFACE.size
SECRET_BYTES = 32
GREETING_BYTES = 1 + SECRET_BYTES

_LAYERS: tuple[Layer, ...] = get_args(Layer)


@dataclass(frozen=True)
class Preface:
    """What the dialling peer claims.

    Attributes:
        layer: How it wants frames carried.
        dialler: Its PeerID.
        acceptor: PeerID that it wants to reach.
        fingerprint: Of the certificate that it will show (`fingerprint_of`).
    """

    layer: Layer
    dialler: str
    acceptor: str
    fingerprint: bytes

    def encode(self) -> bytes:
        """Return its `PREFACE_BYTES` bytes."""
        keys = public_key_of(self.dialler), public_key_of(self.acceptor)
        return _PREFACE.pack(_MAGIC, VERSION, _LAYERS.index(self.layer), *keys, self.fingerprint)


def fingerprint_of(certificate: bytes) -> bytes:
    """Return the SHA-256 of a certificate's DER."""
    return hashlib.sha256(certificate).digest()


def parse_preface(data: bytes | bytearray) -> Preface:
    """Decode `PREFACE_BYTES` bytes of a stranger; raises Refused if they are no preface, or of another version."""
    if len(data) != PREFACE_BYTES:
        raise Refused("malformed preface", f"expected {PREFACE_BYTES} bytes, got {len(data)}")
    magic, version, layer, dialler, acceptor, fingerprint = _PREFACE.unpack(data)
    if magic != _MAGIC:
        raise Refused("malformed preface", "it does not begin as a direct channel does")
    if version != VERSION:
        raise Refused("other version", f"expected version {VERSION} of direct channels, got {version}")
    if layer >= len(_LAYERS):
        raise Refused("malformed preface", f"expected a layer below {len(_LAYERS)}, got {layer}")
    return Preface(_LAYERS[layer], peer_of(dialler), peer_of(acceptor), fingerprint)


def encode_greeting(layer: Layer, secret: bytes) -> bytes:
    """Return the `GREETING_BYTES` that each side sends first inside TLS: the layer, confirmed, and its secret."""
    return bytes([_LAYERS.index(layer)]) + secret


def parse_greeting(data: bytes | bytearray, layer: Layer) -> bytes:
    """Return the other side's secret.

    Raises:
        Refused: It confirms another layer than `layer`: somebody between has altered the preface.
    """
    if len(data) != GREETING_BYTES or data[0] != _LAYERS.index(layer):
        raise Refused("tls failure", f"the greeting does not confirm the layer {layer}")
    return bytes(data[1:])
