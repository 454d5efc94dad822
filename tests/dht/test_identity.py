from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.dht.identity import (
    IDENTITY_FILE,
    Identity,
    IdentityError,
    load_or_create,
    peer_of,
    public_key_of,
    verify,
)


@given(st.binary(min_size=32, max_size=32))
def test_a_key_has_one_name(key: bytes) -> None:
    peer = peer_of(key)
    assert public_key_of(peer) == key
    for other in (
        peer + " ",
        " " + peer,
        peer[:-1] + " ",
        "1" + peer,
        peer[1:] + "\n",
        peer.replace("K", "0"),
    ):
        with pytest.raises(ValueError, match="Ed25519 PeerID"):
            public_key_of(other)


def test_the_name_of_a_known_key() -> None:
    # From the libp2p specification of PeerIDs, an Ed25519 key.
    peer = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
    assert peer_of(public_key_of(peer)) == peer


@pytest.mark.parametrize("text", ["", "0" * 52, "é" * 52, "1" * 52, "z" * 52, "1" * 100_000])
def test_text_that_is_no_peer_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Ed25519 PeerID"):
        public_key_of(text)


def test_an_identity_is_made_once_and_private(tmp_path: Path) -> None:
    home = tmp_path / "a" / "b"
    first = load_or_create(home)
    assert load_or_create(home).peer == first.peer
    assert first.peer.startswith("12D3KooW")
    assert stat.S_IMODE((home / IDENTITY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in home.iterdir()] == [IDENTITY_FILE]


def test_threads_that_make_an_identity_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        peers = {identity.peer for identity in pool.map(lambda _: load_or_create(tmp_path), range(8))}
    assert len(peers) == 1


def test_signatures_hold_in_their_domain_only(identity: Identity, stranger: Identity) -> None:
    signature = identity.sign("a", b"data")
    assert verify(identity.peer, "a", b"data", signature)
    assert not verify(identity.peer, "b", b"data", signature)
    assert not verify(identity.peer, "a", b"Data", signature)
    assert not verify(stranger.peer, "a", b"data", signature)
    assert not verify("12D3KooWnobody", "a", b"data", signature)
    assert not verify(identity.peer, "a", b"data", b"short")


def test_a_domain_cannot_be_shifted_into_the_data(identity: Identity) -> None:
    assert not verify(identity.peer, "ab", b"c", identity.sign("a", b"bc"))


def test_refuses_what_others_can_read(tmp_path: Path) -> None:
    path = load_or_create(tmp_path).path
    path.chmod(0o640)
    with pytest.raises(IdentityError, match=r"mode 0640 .* chmod 600"):
        load_or_create(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"garbage", bytes(68), b"\x08\x00\x12\x40" + bytes(64), bytes(100_000)]
)
def test_refuses_garbage(tmp_path: Path, data: bytes) -> None:
    path = load_or_create(tmp_path).path
    path.write_bytes(data)
    with pytest.raises(IdentityError, match="expected a libp2p Ed25519 private key") as caught:
        load_or_create(tmp_path)
    assert "\n" not in str(caught.value)


def test_refuses_halves_that_do_not_match(tmp_path: Path) -> None:
    path = load_or_create(tmp_path).path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IdentityError, match="does not match"):
        load_or_create(tmp_path)


def test_refuses_links_and_directories(tmp_path: Path) -> None:
    target = load_or_create(tmp_path / "real").path
    (tmp_path / IDENTITY_FILE).symlink_to(target)
    with pytest.raises(IdentityError, match="identity file"):
        load_or_create(tmp_path)
    (tmp_path / "other" / IDENTITY_FILE).mkdir(parents=True)
    with pytest.raises(IdentityError, match="identity file"):
        load_or_create(tmp_path / "other")


def test_a_home_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="identity file"):
        load_or_create(tmp_path / "file" / "home")
