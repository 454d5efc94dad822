"""Daemons for the training scripts of end-to-end tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from e2e.swarm import DaemonProcess, Swarm

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
