"""Starts the daemons of benchmarks, and hears what benchmarks' processes say."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from equipoise.peer.demo.swarm import Child, Family

START_SECONDS = 120.0
"""Longest time for all daemons to print an address: 32 of them share two cores."""


def start_daemons(family: Family, homes: Sequence[Path]) -> str:
    """Start a daemon on each home, which only this machine can reach, joined to the first; returns its address."""
    equipoise = [sys.executable, "-c", "from equipoise.peer.cli import main; main()", "daemon"]
    address, join = "", list[str]()
    for some in (homes[:1], homes[1:]):
        children = [
            family.start(
                f"daemon {home.name}",
                [*equipoise, "--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0", *join],
            )
            for home in some
        ]
        addresses = heard(family, children, "/", START_SECONDS)
        address = address or addresses[children[0]]
        join = ["--join", address]
    return address


def heard(family: Family, children: Sequence[Child], start: str, seconds: float) -> dict[Child, str]:
    """The first line that begins with `start` of each child.

    Raises:
        SystemExit: A child has ended before that, or time is over.
    """
    found: dict[Child, str] = {}
    deadline = time.monotonic() + seconds
    while len(found) < len(children):
        if time.monotonic() > deadline:
            silent = ", ".join(child.name for child in children if child not in found)
            raise SystemExit(f"waited {seconds:g} s for {silent}")
        for child, line in family.hear(deadline - time.monotonic()):
            if line is None and child not in found and child in children:
                raise SystemExit(child.ending)
            if line is not None and child in children and line.startswith(start):
                found.setdefault(child, line.strip())
    return found
