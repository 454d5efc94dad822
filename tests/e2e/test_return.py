"""Daemons that were killed find each other again by what they remember alone."""

from __future__ import annotations

import time

import pytest

from e2e.swarm import DaemonProcess, Swarm, eventually

LOCAL = ["--listen", "/ip4/127.0.0.1/tcp/0"]
TIMES = 20
RETURN_SECONDS = 15.0
"""From the first line of the one that is up last until both say that they have joined."""


def back(daemons: list[DaemonProcess]) -> float:
    for daemon in daemons:
        daemon.start()
    began = time.monotonic()
    for daemon in daemons:
        eventually(
            lambda daemon=daemon: any(state.startswith("joined: 1 ") for state in daemon.states), "joining"
        )
    return time.monotonic() - began


def pair(swarm: Swarm) -> tuple[list[DaemonProcess], list[str]]:
    """Two daemons that have met and were killed, and their addresses. They start without an address to join through."""
    first = swarm.daemon("first", args=LOCAL)
    second = swarm.daemon("second", join=[first.address], args=LOCAL)
    for daemon in (first, second):
        eventually(lambda daemon=daemon: "joined: 1 " in daemon.output, "meeting")
    for daemon in (first, second):
        daemon.kill()
    assert (first.home / "control.sock").exists()
    again = [DaemonProcess(daemon.home, swarm.env, args=LOCAL) for daemon in (first, second)]
    swarm.processes += again
    return again, [*first.addresses, *second.addresses]


def test_both_daemons_of_a_swarm_are_killed_and_restarted(swarm: Swarm) -> None:
    daemons, before = pair(swarm)
    assert daemons[0].cli("status").returncode == 3
    back(daemons)
    assert [address for daemon in daemons for address in daemon.addresses] == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_they_do_so_every_time(swarm: Swarm) -> None:
    daemons, _ = pair(swarm)
    took = []
    for _ in range(TIMES):
        took.append(back(daemons))
        for daemon in daemons:
            daemon.kill()
    print(f"together again after {min(took):.1f} to {max(took):.1f} s")
    assert max(took) <= RETURN_SECONDS
