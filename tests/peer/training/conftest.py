"""A swarm in one process for the tests of training."""

from __future__ import annotations

import pytest

from fakes.training import FakeSwarm


@pytest.fixture(params=["fp32"])
def fake(request: pytest.FixtureRequest) -> FakeSwarm:
    return FakeSwarm(request.param)
