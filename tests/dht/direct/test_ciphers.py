"""Ciphers of records: the RFC's bytes, what each end offers, and that the weaker offer holds."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from equipoise.dht.direct import aead, ciphers, handshake
from equipoise.dht.direct.aead import BODY, HEAD, Opener, Sealer
from equipoise.dht.direct.ciphers import CIPHERS, NONCE_BYTES, TAG_BYTES, Aegis
from equipoise.dht.direct.handshake import Preface
from equipoise.dht.direct.streams import AeadStream
from equipoise.dht.direct.tls import make_context
from equipoise.dht.identity import Identity
from equipoise.dht.streams import BytesRefused
from equipoise.dht.transport import MAX_BODY_BYTES, FramedChannel

KEY = bytes(range(32))
RFC_NONCE = bytes(range(16, 48))
RFC_SEALED = bytes.fromhex(
    "72120c2ea8236180d67859001f4729077b7064c414384fe3a7b52f1571f4f8a7d0f01e18db4f3bc0adb150702e5d147a"
    "8d36522132761b994c1bd395589e2ccf0790dfe2a3d12d61cd666b2859827739db4037dd3124c78424459376f6cac08e"
    "1a7223a2a43e398ce6385cd654a19f481cba3b8f25910b42635d391828520bf1512763f0c8f5cdbd"
)
"""Ciphertext and tag of the second test vector of AEGIS-256X2 in RFC 10032."""


def test_aegis_writes_the_bytes_of_the_rfc() -> None:
    plain, associated = bytes([4, 5, 6, 7]) * 30, bytes.fromhex("0102030401020304")
    sealed, opened = bytearray(len(RFC_SEALED)), bytearray(len(plain))
    Aegis(KEY).encrypt_into(RFC_NONCE, plain, associated, sealed)
    assert sealed == RFC_SEALED
    Aegis(KEY).decrypt_into(RFC_NONCE, RFC_SEALED, associated, opened)
    assert opened == plain


def test_nonces_of_records_differ_in_aegis_as_in_gcm() -> None:
    place, seen = bytearray(3 + TAG_BYTES), set()
    for number in (0, 1, 255, 256, 2**64, 2**95):
        Aegis(KEY).encrypt_into(number.to_bytes(NONCE_BYTES, "big"), b"abc", b"", place)
        seen.add(bytes(place))
    assert len(seen) == 6


@pytest.mark.parametrize("cipher", CIPHERS)
def test_what_was_altered_does_not_open(cipher) -> None:
    rng, nonce = random.Random(7), bytes(NONCE_BYTES)
    for _ in range(300):
        plain = rng.randbytes(rng.randint(1, 300))
        sealed, place = bytearray(len(plain) + TAG_BYTES), bytearray(len(plain))
        cipher(KEY).encrypt_into(nonce, plain, b"head", sealed)
        cipher(KEY).decrypt_into(nonce, sealed, b"head", place)
        assert place == plain
        sealed[rng.randrange(len(sealed))] ^= rng.randint(1, 255)
        for wrong in (b"head", b"tail"):
            with pytest.raises(InvalidTag):
                cipher(KEY).decrypt_into(nonce, sealed, wrong, place)


async def test_frames_of_aegis_arrive_over_a_change_of_keys_and_no_other_cipher_opens_them(
    monkeypatch,
) -> None:
    monkeypatch.setattr(aead, "REKEY_RECORDS", 2)
    near, far = socket.socketpair()
    sender, receiver = (AeadStream(end, Sealer(KEY, Aegis), Opener(KEY, Aegis)) for end in (near, far))
    body = os.urandom(MAX_BODY_BYTES)
    channel = FramedChannel("me", receiver, lambda channel: None)
    sending = asyncio.ensure_future(FramedChannel("it", sender, lambda channel: None).send(b"header", body))
    assert await channel.receive(lambda _, size: memoryview(bytearray(size))) == (b"header", body)
    await sending
    sender.close()
    channel.close()
    for kind in (HEAD, BODY):
        record = memoryview(bytearray(aead.PREFIX_BYTES + 5 + TAG_BYTES))
        Sealer(KEY, Aegis).seal_into(kind, b"hello", record)
        with pytest.raises(BytesRefused, match="not authentic"):
            Opener(KEY, AESGCM).open(record)


def test_a_daemon_offers_aegis_where_it_is_installed_and_faster(monkeypatch) -> None:
    seconds = {Aegis: 1.0, AESGCM: 2.0}
    monkeypatch.setattr(ciphers, "_seconds", seconds.get)
    offered = ciphers.offered.__wrapped__
    assert offered() == (1, "AEGIS-256X2")
    seconds[Aegis] = 2.0
    assert offered() == (0, "AES-256-GCM: AEGIS-256X2 is slower on this processor")
    monkeypatch.setattr(ciphers, "aegis256x2", None)
    assert offered() == (0, "AES-256-GCM: the package aeg is not installed")


def test_the_probe_times_both_ciphers() -> None:
    assert all(ciphers._seconds(cipher) > 0 for cipher in CIPHERS)
    assert ciphers.offered()[0] in range(len(CIPHERS))


@pytest.mark.parametrize(
    ("offers", "cipher"),
    [
        ((0, 0), AESGCM),
        ((0, 1), AESGCM),
        ((1, 0), AESGCM),
        ((1, 1), Aegis),
        ((1, 255), Aegis),
        ((255, 0), AESGCM),
    ],
)
async def test_the_weaker_offer_holds_at_both_ends(offers, cipher, monkeypatch) -> None:
    turns = iter(offers)
    monkeypatch.setattr(ciphers, "offered", lambda: (next(turns), ""))
    dialler, acceptor = (Identity(Ed25519PrivateKey.generate(), Path()) for _ in range(2))
    preface = Preface("aead", dialler.peer, acceptor.peer)
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    there, here = await asyncio.gather(
        handshake.secure(near, make_context(dialler), preface, dialler=True),
        handshake.secure(far, make_context(acceptor), preface, dialler=False),
    )
    assert isinstance(there, AeadStream)
    assert isinstance(here, AeadStream)
    for sends, receives in ((there, here), (here, there)):
        assert isinstance(sends._sealer._cipher, cipher)
        assert isinstance(receives._opener._cipher, cipher)
        assert sends._sealer._key == receives._opener._key
    there.close()
    here.close()
