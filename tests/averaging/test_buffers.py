"""Memory comes back by itself, and never while anybody can still see it."""

from __future__ import annotations

import numpy as np

from equipoise.averaging.aio.buffers import GRAIN_BYTES, BufferPool


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
    where = address(pool.take(GRAIN_BYTES - 5))
    again = pool.take(GRAIN_BYTES - 900)
    assert (address(again), len(again)) == (where, GRAIN_BYTES - 900)


def test_trimming_lets_go_of_what_is_idle() -> None:
    pool = BufferPool()
    kept = pool.take(10)
    del kept
    assert pool.idle_bytes == GRAIN_BYTES
    pool.trim()
    assert pool.idle_bytes == 0
