from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from equipoise.peer.errors import Refused
from equipoise.peer.images import SharedImage
from equipoise.peer.memory import Region


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:equipoise")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="sealed memory is Linux's")


def test_both_sides_see_the_same_values() -> None:
    ours = Region.create(1000)
    theirs = Region.attach(os.dup(ours.fd), 1000)

    ours.contribution.fill_(1.5)
    theirs.result.copy_(theirs.contribution * 2)

    assert torch.equal(ours.result, torch.full((1000,), 3.0))
    for region in (ours, theirs):
        region.close_fd()
        region.close_fd()


@linux
def test_nothing_is_left_when_the_last_tensor_goes() -> None:
    gc.collect()  # Runs of other tests may hold memory in cycles.
    before = mapped(), descriptors()
    region = Region.create(10)
    view = region.result[2:4]
    region.close_fd()
    del region
    gc.collect()
    assert mapped() == before[0] + 1
    view.fill_(1.0)
    del view
    gc.collect()
    assert (mapped(), descriptors()) == before


@linux
def test_memory_that_could_end_the_daemon_is_refused() -> None:
    fd = os.memfd_create("evil", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 80)
    before = descriptors()

    with pytest.raises(Refused, match="sealed"):
        Region.attach(os.dup(fd), 10)
    assert descriptors() == before
    os.close(fd)

    honest = Region.create(10)
    with pytest.raises(PermissionError):
        os.ftruncate(honest.fd, 0)
    honest.close_fd()


def test_memory_of_another_size_is_refused() -> None:
    region = Region.create(10)
    for values in (9, 11, 0):
        with pytest.raises(Refused, match="bytes of shared memory, got 80"):
            Region.attach(os.dup(region.fd), values)
    region.close_fd()


def test_what_is_not_memory_is_refused(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(Refused):
        Region.attach(read, 10)
    (tmp_path / "file").write_bytes(bytes(80))
    with pytest.raises(Refused):
        Region.attach(os.open(tmp_path / "file", os.O_RDWR), 10)


def test_more_than_the_machine_has_is_refused() -> None:
    before = descriptors()
    with pytest.raises(Refused, match="shared memory"):
        Region.create(1 << 60)
    assert descriptors() == before


def test_an_image_of_which_nobody_asks_any_more_takes_no_descriptor() -> None:
    gc.collect()
    before = descriptors()
    image = SharedImage.reserve(1000)
    assert descriptors() == before + 1
    del image
    assert descriptors() == before
