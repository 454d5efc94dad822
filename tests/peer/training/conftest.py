"""A swarm in one process for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fakes.world import World, made


@pytest.fixture(params=["fp32"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
