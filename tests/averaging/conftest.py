"""The fixture of a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fakes.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Daemons of one run over an in-memory transport, stopped after the test."""
    cluster = Cluster()
    yield cluster
    await cluster.stop()
