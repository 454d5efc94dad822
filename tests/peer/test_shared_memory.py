"""Shared memory: what one process writes another reads, and nothing that a client sends ends the daemon."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from pathlib import Path

import pytest

from equipoise.peer import shared_memory
from equipoise.peer.errors import Refused
from equipoise.peer.shared_memory import GRAIN_BYTES, MESSAGE_BYTES, Region, SharedMemory

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")


def descriptors() -> int:
    """The open descriptors of shared memory: threads of earlier tests may close sockets at any time."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(one.readlink()).startswith("/memfd:")
    return found


def test_the_daemon_reads_the_bytes_that_a_client_copies() -> None:
    mine = SharedMemory.reserve(8)
    mine.allocate(8)
    mine.view(8, writable=True)[:] = b"an image"
    theirs = SharedMemory.attach(os.dup(mine.fd), mine.capacity)
    view = theirs.view(8, writable=False)
    mine.close()
    theirs.close()
    theirs.close()
    assert view == b"an image"
    with pytest.raises(TypeError):
        view[0] = 1


def test_an_interpreter_built_for_an_old_system_shares_memory_too(monkeypatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(shared_memory, "SEALED", False)
    test_the_daemon_reads_the_bytes_that_a_client_copies()


def test_the_client_reads_the_bytes_that_the_daemon_writes() -> None:
    mine = SharedMemory.reserve(10_000_000)
    theirs = SharedMemory.attach(os.dup(mine.fd), 10_000_000)
    theirs.allocate(5)
    theirs.view(5, writable=True)[:] = b"image"
    theirs.close()
    assert mine.view(5, writable=True) == b"image"
    mine.close()


@linux
def test_reserved_memory_takes_none_until_it_is_used() -> None:
    image = SharedMemory.reserve(1 << 36)
    assert os.fstat(image.fd).st_blocks == 0
    image.allocate(1 << 20)
    assert os.fstat(image.fd).st_blocks * 512 == 1 << 20
    image.close()


@linux
def test_memory_that_could_end_the_daemon_is_refused_and_nothing_is_left() -> None:
    gc.collect()
    before = descriptors()
    fd = os.memfd_create("evil", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 80)
    with pytest.raises(Refused, match="sealed"):
        SharedMemory.attach(fd, 80)
    honest = SharedMemory.reserve(20)
    with pytest.raises(Refused, match="81 bytes of shared memory, got 20"):
        SharedMemory.attach(os.dup(honest.fd), 81)
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(Refused):
        SharedMemory.attach(read, 80)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    with tempfile.TemporaryFile() as file:
        file.truncate(80)
        with pytest.raises(Refused):
            SharedMemory.attach(os.dup(file.fileno()), 80)
    del honest
    assert descriptors() == before


def test_more_than_the_machine_has_is_refused() -> None:
    image = SharedMemory.reserve(1 << 50)
    with pytest.raises(Refused, match="shared memory"):
        image.allocate(1 << 50)
    image.close()
    for capacity in (-1, 1 << 80):
        with pytest.raises(Refused, match="shared memory"):
            SharedMemory.reserve(capacity)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:equipoise")


@linux
def test_nothing_is_left_when_the_last_view_goes() -> None:
    gc.collect()  # Runs of other tests may hold memory in cycles.
    before = mapped(), descriptors()
    region = Region.create(10)
    view = region.mean[2:4]
    region.memory.close()
    del region
    gc.collect()
    assert mapped() == before[0] + 1
    view[:] = b"ab"
    del view
    gc.collect()
    assert (mapped(), descriptors()) == before


@linux
def test_vectors_that_could_end_the_daemon_are_refused() -> None:
    fd = os.memfd_create("evil", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, Region.create(10).memory.capacity)
    before = descriptors()

    with pytest.raises(Refused, match="sealed"):
        Region.attach(os.dup(fd), 10)
    assert descriptors() == before
    os.close(fd)

    honest = Region.create(10)
    with pytest.raises(PermissionError):
        os.ftruncate(honest.memory.fd, 0)
    honest.memory.close()


def test_an_image_of_which_nobody_asks_any_more_takes_no_descriptor() -> None:
    gc.collect()
    before = descriptors()
    image = SharedMemory.reserve(1000)
    assert descriptors() == before + 1
    del image
    assert descriptors() == before


@linux
def test_the_same_pages_serve_one_message_after_another_and_never_two_at_once() -> None:
    arena = Region.create(10).sent
    first, second = arena.take(100_000), arena.take(5)
    assert (first.at, second.at) == (0, 2 * GRAIN_BYTES)
    first.room(0, 100_000)[:] = bytes([7]) * 100_000
    view = first.room(50_000, 10)
    del first
    assert arena.take(100_000).at == 3 * GRAIN_BYTES, "a view of it is left"
    del view
    assert arena.take(100_001).at == 0
    assert bytes(arena.piece(0, 3).room(0, 3)) == b"\7\7\7"


def test_a_piece_that_is_not_there_is_refused() -> None:
    region = Region.create(10)
    for at, size in ((-1, 5), (MESSAGE_BYTES - 4, 5), (0, MESSAGE_BYTES + 1)):
        with pytest.raises(Refused, match="expected a message within"):
            region.sent.piece(at, size)
    most = region.received.take(MESSAGE_BYTES)
    with pytest.raises(Refused, match=r"messages that were not read take 1073.7 MB: there is no room"):
        region.received.take(1)
    assert len(most) == MESSAGE_BYTES


def test_a_region_that_is_released_keeps_no_memory_though_something_holds_it() -> None:
    region = Region.create(64)
    taken = region.sent.take(10)
    region.release()
    region.release()
    assert region.memory.fd == -1
    assert len(region.contribution) == len(region.mean) == 0
    taken[:] = 1
    with pytest.raises(Refused, match="expected a message within 0 bytes"):
        region.received.take(1)
