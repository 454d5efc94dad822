"""A swarm in one process for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fakes.training import FakeSwarm
from fakes.world import World


@pytest.fixture(params=["fp32"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    found = World(request.param)
    yield found
    found.close()


@pytest.fixture(params=["fp32"])
def fake(request: pytest.FixtureRequest) -> FakeSwarm:
    """For the few tests that say what each round gives."""
    return FakeSwarm(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
