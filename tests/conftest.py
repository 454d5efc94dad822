"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from e2e.swarm import ChildProcess, Swarm
from equipoise.dht.hivemind_stub import bare_packages

bare_packages()  # As in a daemon, before anything imports hivemind.

# Examples have no deadline: machines stall, and the first example compiles or imports.
settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")

CALL_REPORT = pytest.StashKey[pytest.TestReport]()


def pytest_configure() -> None:
    """Have daemons heed SIGINT though the tests run in the background of a shell, which has its children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ChildProcess.forks = True


LONG = ("test_readme.py", "e2e", "sim")
"""Files and folders whose tests take longest: they come first, so that no processor waits for the last of them."""


def pytest_collection_finish() -> None:
    """Have the collector of garbage leave thousands of tests alone: it would look through them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # Worlds make many objects, and little of that is garbage.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first."""
    items.sort(key=lambda item: not set(LONG).intersection(item.path.parts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the report of a test's call, so that fixtures know whether it failed."""
    report = yield
    if report.when == "call":
        item.stash[CALL_REPORT] = report
    return report


@pytest.fixture
def swarm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Swarm]:
    """An empty swarm in `tmp_path`; its processes end with the test, and their logs show where it failed."""
    swarm = Swarm(tmp_path)
    yield swarm
    left = swarm.close()
    report = request.node.stash.get(CALL_REPORT, None)
    if left or report is None or report.failed:
        print(swarm.logs())
    assert not left, f"these processes outlived their daemons: {left}"
