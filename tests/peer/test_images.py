"""Images in shared memory: what one process writes another reads, and nothing that a client sends ends the daemon."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from equipoise.peer.errors import Refused
from equipoise.peer.images import SharedImage, shared_copy

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_a_client_copies_the_daemon_reads() -> None:
    mine = shared_copy(memoryview(b"an image"))
    theirs = SharedImage.attach(os.dup(mine.fd), mine.capacity)
    view = theirs.view(8, writable=False)
    mine.close()
    theirs.close()
    theirs.close()
    assert view == b"an image"
    with pytest.raises(TypeError):
        view[0] = 1


def test_what_the_daemon_writes_the_client_reads() -> None:
    mine = SharedImage.reserve(10_000_000)
    theirs = SharedImage.attach(os.dup(mine.fd), 10_000_000)
    theirs.allocate(5)
    theirs.view(5, writable=True)[:] = b"image"
    theirs.close()
    assert mine.view(5, writable=True) == b"image"
    mine.close()


@linux
def test_what_is_set_aside_takes_no_memory_until_it_is_used() -> None:
    image = SharedImage.reserve(1 << 36)
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
        SharedImage.attach(fd, 80)
    honest = shared_copy(memoryview(bytes(80)))
    with pytest.raises(Refused, match="81 bytes of shared memory, got 80"):
        SharedImage.attach(os.dup(honest.fd), 81)
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(Refused):
        SharedImage.attach(read, 80)
    del honest
    assert descriptors() == before


def test_more_than_the_machine_has_is_refused() -> None:
    image = SharedImage.reserve(1 << 50)
    with pytest.raises(Refused, match="shared memory"):
        image.allocate(1 << 50)
    image.close()
    for capacity in (-1, 1 << 80):
        with pytest.raises(Refused, match="shared memory"):
            SharedImage.reserve(capacity)
