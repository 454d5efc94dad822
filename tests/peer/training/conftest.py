"""A swarm in one process for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fakes.training import FakeSwarm


@pytest.fixture(params=["fp32"])
def fake(request: pytest.FixtureRequest) -> FakeSwarm:
    return FakeSwarm(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
