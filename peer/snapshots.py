"""The daemon's side of `Run.offer`, `fetch` and `recover`: memory that a client shares, and what is done with it."""

from __future__ import annotations

import asyncio
import math

import torch

from equipoise.averaging.state import MAX_EPOCH, StateId
from equipoise.averaging.transfer.outcome import FetchOutcome, MeanOutcome
from equipoise.peer.errors import Refused
from equipoise.peer.images import SharedImage
from equipoise.peer.memory import VALUE_BYTES
from equipoise.peer.messages import FetchMean, FetchState
from equipoise.peer.ports import Transfer

MAX_TIMEOUT = 86_400.0
"""A day; a longer wait is a mistake in the unit."""


async def offer_snapshot(transfer: Transfer, state: StateId, image: SharedImage) -> None:
    """Serve an image in place of the one before; returns at once, unless that is still being digested.

    Raises:
        Refused: It cannot be mapped.
        ValueError: It is larger than can be served.
    """
    await transfer.offer(state, image.view(image.capacity, writable=False))


async def fetch_snapshot(transfer: Transfer, request: FetchState, image: SharedImage) -> FetchOutcome:
    """Download a snapshot into a client's memory, whose capacity is the limit of its size.

    Raises:
        Refused: An argument is out of range.
        ValueError: A download of this run is going on already.
    """
    if not 0 <= request.at_least <= MAX_EPOCH:
        raise Refused(f"expected an epoch of 0 to {MAX_EPOCH}, got {request.at_least}")
    _check(request.timeout)

    async def room(size: int) -> memoryview:
        try:
            # For gigabytes the kernel takes seconds to provide the pages.
            await asyncio.get_running_loop().run_in_executor(None, image.allocate, size)
            return image.view(size, writable=True)
        except Refused as error:
            raise ValueError(str(error)) from error

    return await transfer.fetch(
        request.at_least, image.capacity, request.timeout, room, frozenset(request.among)
    )


async def fetch_mean(transfer: Transfer, request: FetchMean, memory: SharedImage) -> MeanOutcome:
    """Get a mean that was missed into a client's memory, which has just its size.

    Raises:
        Refused: An argument is out of range.
        ValueError: A download of this run is going on already.
    """
    _check(request.timeout)
    if memory.capacity != transfer.values * VALUE_BYTES:
        raise Refused(
            f"expected shared memory of {transfer.values * VALUE_BYTES} bytes, got {memory.capacity}"
        )

    def result() -> torch.Tensor:
        try:
            memory.allocate(memory.capacity)
            return torch.frombuffer(memory.view(memory.capacity, writable=True), dtype=torch.float32)
        except Refused as error:
            raise ValueError(str(error)) from error

    return await transfer.recover(request.after, request.timeout, result, request.proved, request.patient)


def _check(timeout: float) -> None:
    if not (math.isfinite(timeout) and 0 < timeout <= MAX_TIMEOUT):
        raise Refused(f"expected a timeout of more than 0 and at most {MAX_TIMEOUT:g} seconds, got {timeout}")
