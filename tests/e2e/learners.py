"""Daemons for the training scripts of end-to-end tests, and what those scripts do alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from e2e.swarm import DaemonProcess, Swarm
from equipoise.peer import Lost, Refused
from equipoise.peer.training import Shared

LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")


def daemons(swarm: Swarm, count: int) -> list[DaemonProcess]:
    """`count` daemons that only this machine can reach."""
    return swarm.daemons(count, args=LISTEN)


@contextlib.contextmanager
def shared_daemons(folders: pytest.TempPathFactory, count: int) -> Iterator[list[DaemonProcess]]:
    """`count` daemons that the tests of a module share, so that each needs a run of another name."""
    swarm = Swarm(folders.mktemp("daemons"))
    try:
        yield daemons(swarm, count)
    except BaseException:
        print(swarm.logs())
        raise
    finally:
        left = swarm.close()
    assert not left, f"these processes outlived their daemons: {left}"


def count_up(table: Shared, clocks: int, ids: torch.Tensor) -> int:
    """Add 1 to rows of `x` in each clock; return how many times that was acknowledged."""
    pushed = []
    for _ in range(clocks):
        rows = table.pull(x=ids)
        rows["x"].backward(torch.full_like(rows["x"], -1.0))
        pushed.append(table.push())
        table.clock()
    ends = [one.exception(60.0) for one in pushed]
    assert all(one is None or isinstance(one, Lost | Refused) for one in ends)
    return ends.count(None)
