"""The ciphers of our records, and which one this daemon offers.

AES-256-GCM (NIST SP 800-38D) comes with OpenSSL and is always there. AEGIS-256X2 (RFC 10032) comes with the package
`aeg`, which wraps libaegis. Both have keys of 256 bits and tags of 128.

OpenSSL needs AVX-512 to use wide AES instructions for GCM. libaegis uses them with AVX2 too. On an EPYC without
AVX-512, AES-GCM seals 2.6 GB/s and AEGIS 14, in records of 1 MiB. Records below 16 KiB take a few microseconds longer.

Each end of a channel offers a cipher inside TLS, and the weaker offer holds (`handshake`): a daemon without `aeg` meets
all others. A processor without AES instructions takes longer for AEGIS than for GCM, so a daemon measures both once.
"""

from __future__ import annotations

import functools
import time
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from equipoise.dht.streams import Buffer

try:
    from aeg import aegis256x2
except ImportError:
    aegis256x2 = None

KEY_BYTES = 32
NONCE_BYTES = 12
"""Bytes of a nonce; those of AEGIS are longer, and end in zeros."""
TAG_BYTES = 16
PROBE_BYTES = 64 * 1024
PROBES = 5


class Aegis:
    """AEGIS-256X2 under one key, with the methods of `AESGCM`. `aeg` does not check that `buf` is writable."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encrypt_into(self, nonce: bytes, data: Buffer, associated_data: Buffer, buf: Buffer) -> None:
        """Write ciphertext and tag of `data` into `buf`, which has exactly their size."""
        aegis256x2.encrypt(
            self._key, nonce.ljust(aegis256x2.NONCEBYTES, b"\0"), data, associated_data, into=buf
        )

    def decrypt_into(self, nonce: bytes, data: Buffer, associated_data: Buffer, buf: Buffer) -> None:
        """Write the plaintext of `data` into `buf`, which has its size; raises InvalidTag if it is not authentic."""
        nonce = nonce.ljust(aegis256x2.NONCEBYTES, b"\0")
        try:
            aegis256x2.decrypt(self._key, nonce, data, associated_data, into=buf)
        except ValueError:
            raise InvalidTag from None


Cipher: TypeAlias = AESGCM | Aegis

CIPHERS: tuple[type[Cipher], ...] = (AESGCM, Aegis)
"""From the one that all have to the best: a daemon that offers one has those before it. The order is protocol."""


@functools.cache
def offered() -> tuple[int, str]:
    """Return the index in `CIPHERS` of the best one here, and which it is and why, one line; measures for 2 ms once."""
    if aegis256x2 is None:
        return 0, "AES-256-GCM: the package aeg is not installed"
    if _seconds(Aegis) >= _seconds(AESGCM):
        return 0, "AES-256-GCM: AEGIS-256X2 is slower on this processor"
    return 1, "AEGIS-256X2"


def _seconds(make: type[Cipher]) -> float:
    """Time one seal of `PROBE_BYTES`: the least of `PROBES`."""
    cipher, plain, place = make(bytes(KEY_BYTES)), bytes(PROBE_BYTES), bytearray(PROBE_BYTES + TAG_BYTES)
    taken = []
    for number in range(PROBES):
        start = time.perf_counter()
        cipher.encrypt_into(number.to_bytes(NONCE_BYTES, "big"), plain, b"", place)
        taken.append(time.perf_counter() - start)
    return min(taken)
