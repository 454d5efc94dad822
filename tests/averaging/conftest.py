"""The fixture of a cluster. Property tests of this folder have no deadline per example: machines stall."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import settings

from fakes.cluster import Cluster

settings.register_profile("equipoise", deadline=None)
settings.load_profile("equipoise")


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Daemons of one run over an in-memory transport, stopped after the test."""
    cluster = Cluster()
    yield cluster
    await cluster.stop()
