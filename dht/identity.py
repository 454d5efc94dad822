"""The identity of a daemon: an Ed25519 key in its home, and the PeerID that is that key.

The PeerID of an Ed25519 key is an identity multihash that contains the public key (libp2p specs, peer-ids.md), so
a signature can be verified from the name of its author alone. The file is libp2p's private key protobuf, as p2pd
reads it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

IDENTITY_FILE = "identity.key"

_KEY_PREFIX = bytes.fromhex("08011240")
"""crypto.proto PrivateKey(key_type=Ed25519, data=64 bytes), up to the data."""
_PEER_PREFIX = bytes.fromhex("002408011220")
"""Identity multihash of PublicKey(key_type=Ed25519, data=32 bytes), up to the data."""
_PEER_CHARACTERS = 52
"""Of every Ed25519 PeerID. Checked first: decoding is quadratic, and ignores white space at the end."""
_FILE_BYTES = len(_KEY_PREFIX) + 64
_SIGNATURE_CONTEXT = b"equipoise/1\0"


class IdentityError(Exception):
    """The identity file cannot be used; the message says why and what to do, in one line."""


class Identity:
    """An Ed25519 `key`, its PeerID in base58, `peer`, and the file that p2pd reads it from, `path`.

    Beside `sign`, only TLS uses the key: its signatures name TLS in what they sign (RFC 8446, section 4.4.3).
    """

    def __init__(self, key: Ed25519PrivateKey, path: Path) -> None:
        self.key = key
        self.path = path
        self.peer = peer_of(key.public_key().public_bytes_raw())

    def sign(self, domain: str, data: bytes) -> bytes:
        """Return the 64-byte signature of `data` for use in `domain` only."""
        return self.key.sign(message(domain, data))


def peer_of(public: bytes) -> str:
    """Return the PeerID of a raw 32-byte public key."""
    return base58.b58encode(_PEER_PREFIX + public).decode()


@functools.lru_cache(4096)  # To decode one takes 20 microseconds.
def public_key_of(peer: str) -> bytes:
    """Return the raw public key in the PeerID of an Ed25519 key; raises ValueError if it holds no such key."""
    raw = b""
    if len(peer) == _PEER_CHARACTERS:
        with contextlib.suppress(ValueError):
            raw = base58.b58decode(peer)
    if len(raw) != len(_PEER_PREFIX) + 32 or not raw.startswith(_PEER_PREFIX):
        raise ValueError(f"expected an Ed25519 PeerID (12D3KooW..., 52 characters), got {peer[:64]!r}")
    return raw[len(_PEER_PREFIX) :]


def verify(peer: str, domain: str, data: bytes, signature: bytes) -> bool:
    """Tell whether `signature` is what `peer` signed over `data` in `domain`; False for anything malformed."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer)).verify(signature, message(domain, data))
    except (ValueError, InvalidSignature):
        return False
    return True


def load_or_create(home: Path) -> Identity:
    """Return the identity kept in `home`, made on first use (directory 0700, file 0600, written atomically).

    Raises IdentityError if the file is readable by others, is not ours, or holds no Ed25519 key.
    """
    path = home / IDENTITY_FILE
    try:
        if not os.path.lexists(path):
            _create(path)
        return Identity(_parse(read_private(path)), path)
    except OSError as error:
        raise IdentityError(f"identity file {path}: {error.strerror or error}") from error


def message(domain: str, data: bytes) -> bytes:
    """Return what is signed for `data` in `domain`."""
    name = domain.encode()
    return _SIGNATURE_CONTEXT + len(name).to_bytes(2, "big") + name + data


def _create(path: Path) -> None:
    private = Ed25519PrivateKey.generate()
    data = _KEY_PREFIX + private.private_bytes_raw() + private.public_key().public_bytes_raw()
    # A link, unlike a rename, never replaces: of two daemons starting at once, both end with the first's key.
    with contextlib.suppress(FileExistsError):
        write_private(path, data, os.link)


def write_private(path: Path, data: bytes, place: Callable[[Path, Path], None] = os.replace) -> None:
    """Write a file that only its owner may read, in one step: `place` gives the finished file its name."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_private(path: Path, limit: int = _FILE_BYTES + 1) -> bytes:
    """Return at most `limit` bytes of a file that only its owner may read; raises OSError otherwise."""
    # To open a pipe that nobody writes to would block without O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("expected a regular file; look at it and remove it")
        if status.st_uid != (own := os.geteuid()):
            raise OSError(f"owned by uid {status.st_uid}, expected {own}; run chown {own} {path}")
        if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
            raise OSError(f"mode {mode:04o} lets others use it, expected 0600; run chmod 600 {path}")
        return file.read(limit)


def _parse(data: bytes) -> Ed25519PrivateKey:
    hint = "restore it from a backup, or move it away to get a new identity"
    if len(data) != _FILE_BYTES or not data.startswith(_KEY_PREFIX):
        raise OSError(f"expected a libp2p Ed25519 private key; {hint}")
    private = Ed25519PrivateKey.from_private_bytes(data[len(_KEY_PREFIX) : len(_KEY_PREFIX) + 32])
    if private.public_key().public_bytes_raw() != data[-32:]:
        raise OSError(f"its public half does not match its private half; {hint}")
    return private
