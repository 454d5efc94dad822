"""Memory comes back by itself, and never while anybody can still see it."""

from __future__ import annotations

import numpy as np
import pytest

from equipoise.averaging.aio.buffer_pool import MIN_GRAIN_BYTES, BufferPool

SIZE = 64 * 1024


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_buffer_is_lent_again_once_its_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.take(1000)
    where, slice_of_it = address(first), first[10:20]
    del first
    assert address(pool.take(1000)) != where
    del slice_of_it
    assert address(pool.take(1000)) == where


def test_sizes_that_differ_a_little_share_buffers() -> None:
    pool = BufferPool()
    where = address(pool.take(SIZE - 5))
    again = pool.take(SIZE - 900)
    assert (address(again), len(again)) == (where, SIZE - 900)


@pytest.mark.parametrize("size", [1, 1000, 4097, 70_000, 540_672, 4 * 1024 * 1024 + 1])
def test_little_is_lent_beyond_what_was_asked_for(size: int) -> None:
    pool = BufferPool()
    pool.take(size)
    assert size <= pool.idle_bytes <= max(size * 9 / 8, MIN_GRAIN_BYTES)


def test_returned_buffers_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.averaging.aio.buffer_pool.MAX_IDLE_BYTES", 3 * SIZE)
    pool = BufferPool()
    lent = [pool.take(size) for size in (SIZE, 2 * SIZE, SIZE)]
    lent.clear()
    assert pool.idle_bytes == sum(each.nbytes for idle in pool.idle.values() for each in idle)
    assert 2 * SIZE <= pool.idle_bytes <= 3 * SIZE


def test_a_buffer_outlives_its_pool() -> None:
    pool = BufferPool()
    view = pool.take(100)
    del pool
    view[:] = bytes(100)
    assert bytes(view) == bytes(100)
