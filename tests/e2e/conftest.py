"""Daemons that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.learners import shared_daemons
from e2e.swarm import DaemonProcess


@pytest.fixture(scope="module")
def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[DaemonProcess]]:
    """`PEERS` daemons, a number of the module: each of its tests needs runs of other names."""
    with shared_daemons(tmp_path_factory, request.module.PEERS) as places:
        yield places
