"""Daemons that were killed find each other again by what they remember alone."""

from __future__ import annotations

import time

import pytest

from e2e.swarm import DaemonProcess, Swarm, eventually

LOCAL = ["--listen", "/ip4/127.0.0.1/tcp/0"]
TIMES = 20
RETURN_SECONDS = 15.0
"""From the first line of the one that is up last until both say that they have joined."""


def killed_and_back(daemons: list[DaemonProcess]) -> float:
    for daemon in daemons:
        daemon.kill()
    for daemon in daemons:
        daemon.start()
    began = time.monotonic()
    for daemon in daemons:
        eventually(
            lambda daemon=daemon: any(one.startswith("joined: 1 ") for one in daemon.states), "joining"
        )
    return time.monotonic() - began


def pair(swarm: Swarm) -> list[DaemonProcess]:
    """Two daemons that have met, each to be started again without an address to join through."""
    first = swarm.daemon("first", args=LOCAL)
    second = swarm.daemon("second", join=[first.address], args=LOCAL)
    for daemon in (first, second):
        eventually(lambda daemon=daemon: "joined: 1 " in daemon.output, "meeting")
    again = [DaemonProcess(daemon.home, swarm.env, args=LOCAL) for daemon in (first, second)]
    swarm.processes += again
    for daemon in (first, second):
        daemon.kill()
    for daemon in again:
        daemon.start()
    return again


def test_both_daemons_of_a_swarm_are_killed_and_restarted(swarm: Swarm) -> None:
    before = {}
    for daemon in (daemons := pair(swarm)):
        eventually(
            lambda daemon=daemon: any(one.startswith("joined: 1 ") for one in daemon.states), "joining"
        )
        before[daemon] = daemon.addresses
    killed_and_back(daemons)
    assert {daemon: daemon.addresses for daemon in daemons} == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_they_do_so_every_time(swarm: Swarm) -> None:
    daemons = pair(swarm)
    took = [killed_and_back(daemons) for _ in range(TIMES)]
    print(f"together again after {min(took):.1f} to {max(took):.1f} s")
    assert max(took) <= RETURN_SECONDS
