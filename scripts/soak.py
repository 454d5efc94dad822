"""Average round after round with real daemons, and look for what grows, what fails and what is late.

    scripts/soak.py --rounds 1000 --values 1M        # memory, descriptors, tasks, threads: flat from round 100 on?
    scripts/soak.py --rounds 10000 --values 200k     # does any round fail, or take much longer than most?

Exits 1 if a round fails or ends in anything but the mean, if p99 exceeds 3 x p50, or if a daemon or its p2pd has grown
between round 100 and the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from bench_load import Bystanders, end_cleanly_when_terminated
from bench_round import count

from e2e.fleet import Fleet, normal
from e2e.swarm import Swarm
from equipoise.averaging.outcome import Outcome

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]
ROUND_SECONDS = 30.0

FIRST_LOOK = 100
"""By this round caches and pools are full; what grows from here on grows for ever."""

WINDOW = 20
"""Usage is the median over that many rounds: a moment with a connection more or a pool less tells nothing."""

CHECK_EVERY = 10
"""Comparing with float64 truth costs as much as a round."""

BOUNDS = {"fp32": 1e-6, "fp16": 1e-3, "int8": 0.010, "nf4": 0.14}
"""NRMSE of a mean, on N(0, 1)."""

MAX_TAIL = 3.0
"""p99 over p50."""

MAX_GROWTH = {"memory": 16e6, "p2pd_memory": 16e6, "tasks": 4, "threads": 2, "files": 4, "p2pd_files": 4}
"""Far below what the least leak leaves in 900 rounds (a task or file each; 1 KB a part), above what allocators and
the DHT's own coming and going do to a process at rest."""

PERCENTILES = (50, 90, 99, 99.9, 100)
SLOWEST = 5
"""Rounds that are shown with their phases."""


@dataclass
class Course:
    """What has happened so far.

    Attributes:
        seconds: Of each round, from the first call to the last return.
        phases: Of each round, as its slowest daemon tells.
        usages: What each daemon held, look by look.
        failures: One line each.
        others: How many cores other programs kept busy meanwhile.
    """

    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    usages: list[list[dict[str, int]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    others: float = 0.0


def usage(fleet: Fleet) -> list[dict[str, int]]:
    """What each daemon holds now, and its p2pd."""
    found = []
    for client, daemon in zip(fleet.clients, fleet.daemons, strict=True):
        status = client.status()
        held = {
            "memory": status.memory,
            "tasks": status.tasks,
            "threads": status.threads,
            "files": status.files,
        }
        children = psutil.Process(daemon.pid).children()
        held["p2pd_memory"] = sum(child.memory_info().rss for child in children)
        held["p2pd_files"] = sum(child.num_fds() for child in children)
        found.append(held)
    return found


def average(fleet: Fleet, number: int, bound: float, course: Course) -> None:
    """One round of all; every `CHECK_EVERY`th is compared with truth."""
    for tensor, value in zip(fleet.tensors, fleet.values, strict=True):
        tensor.copy_(value)
    began = time.perf_counter()
    pending = fleet.start([1.0] * len(fleet.runs), ROUND_SECONDS)
    outcomes: dict[int, Outcome] = {member: one.result() for member, one in enumerate(pending)}
    course.seconds.append(time.perf_counter() - began)
    slowest = max(outcomes.values(), key=lambda outcome: outcome.seconds.get("total", 0.0))
    course.phases.append(dict(slowest.seconds))
    full = len(fleet.runs)
    bad = [one for one in outcomes.values() if not one.ok or len(one.contributors) != full]
    if bad:
        course.failures.append(f"round {number}: {bad[0].reason}")
    elif number % CHECK_EVERY == 0:
        try:
            fleet.check(outcomes, bound)
        except AssertionError as wrong:
            course.failures.append(f"round {number}: no mean, or not the same everywhere: {wrong}")


def looked_at(rounds: int) -> set[int]:
    """The rounds after which usage is taken: the last ones up to round `FIRST_LOOK`, and the last of all."""
    return {*range(FIRST_LOOK - WINDOW, FIRST_LOOK), *range(rounds - WINDOW, rounds)}


def soak(options: argparse.Namespace) -> Course:
    course = Course()
    bound = BOUNDS[options.codec]
    looks = looked_at(options.rounds)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        swarm = Swarm(Path(folder))
        try:
            daemons = swarm.daemons(options.peers, args=LISTEN)
            with Fleet(daemons, normal(options.peers, options.values), codec=options.codec) as fleet:
                bystanders = lately = Bystanders()
                for number in range(options.rounds):
                    average(fleet, number, bound, course)
                    if number in looks:
                        course.usages.append(usage(fleet))
                    if (number + 1) % options.every == 0:
                        print(block(course, options.every, lately), file=sys.stderr, flush=True)
                        lately = Bystanders()
                course.others = bystanders.cores()
        finally:
            left = swarm.close()
            course.failures += [f"left behind: {line}" for line in left]
    return course


def block(course: Course, size: int, bystanders: Bystanders) -> str:
    """A line on the last `size` rounds: late ones in a block in which others were busy are no fault of ours."""
    last = course.seconds[-size:]
    times = ", ".join(f"p{rank:g} {1e3 * percentile(last, rank):.1f}" for rank in (50, 99, 100))
    return (
        f"{len(course.seconds)} rounds, {len(course.failures)} failed; the last {size} in ms: {times}; "
        f"others kept {bystanders.cores():.2f} cores busy"
    )


def growth(usages: Sequence[Sequence[dict[str, int]]]) -> list[dict[str, tuple[float, float]]]:
    """Of each daemon what it held around round 100, and around the last."""
    early, late = usages[:WINDOW], usages[-WINDOW:]
    return [
        {
            key: (
                statistics.median(look[member][key] for look in early),
                statistics.median(look[member][key] for look in late),
            )
            for key in MAX_GROWTH
        }
        for member in range(len(early[0]))
    ]


def percentile(values: Sequence[float], rank: float) -> float:
    """The smallest value that `rank` per cent of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-rank * len(ordered) // 100) - 1))]


def judge(course: Course, options: argparse.Namespace) -> dict[str, Any]:
    """The figures, and what of them violates what is promised."""
    # The first rounds open connections and touch memory for the first time.
    warm = course.seconds[options.warm :]
    ranks = {f"p{rank:g}_ms": 1e3 * percentile(warm, rank) for rank in PERCENTILES}
    violations = course.failures[:10]
    if len(course.failures) > len(violations):
        violations.append(f"and {len(course.failures) - len(violations)} more")
    if ranks["p99_ms"] > MAX_TAIL * ranks["p50_ms"]:
        violations.append(f"p99 is {ranks['p99_ms'] / ranks['p50_ms']:.1f} x p50")
    rows = growth(course.usages) if options.rounds >= 2 * FIRST_LOOK else []
    violations += [
        f"daemon {member}: {key} grew from {early:.0f} to {late:.0f}"
        for member, row in enumerate(rows)
        for key, (early, late) in row.items()
        if late - early > MAX_GROWTH[key]
    ]
    order = sorted(range(options.warm, len(course.seconds)), key=course.seconds.__getitem__, reverse=True)
    slowest = [
        {"round": number, "ms": 1e3 * course.seconds[number], "phases": course.phases[number]}
        for number in order[:SLOWEST]
    ]
    return {
        "peers": options.peers,
        "values": options.values,
        "codec": options.codec,
        "rounds": len(course.seconds),
        "failed": len(course.failures),
        "others_cores": round(course.others, 2),
        **ranks,
        "daemons": rows,
        "slowest": slowest,
        "violations": violations,
    }


def show(verdict: dict[str, Any]) -> None:
    print(
        "  ".join(
            f"{key} {verdict[key]}"
            for key in ("peers", "values", "codec", "rounds", "failed", "others_cores")
        )
    )
    print("  ".join(f"{key} {value:.1f}" for key, value in verdict.items() if key.endswith("_ms")))
    for member, row in enumerate(verdict["daemons"]):
        held = ", ".join(f"{key} {early:.0f} -> {late:.0f}" for key, (early, late) in row.items())
        print(f"daemon {member}, round {FIRST_LOOK} -> last: {held}")
    for slow in verdict["slowest"]:
        phases = "  ".join(f"{name} {1e3 * value:.0f}" for name, value in slow["phases"].items())
        print(f"slow: round {slow['round']}, {slow['ms']:.1f} ms: {phases}")
    for violation in verdict["violations"]:
        print(f"VIOLATED: {violation}")
    if not verdict["violations"]:
        print("all held")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--peers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--values", type=count, default=1_000_000, help="such as 200k or 1M (%(default)s)")
    parser.add_argument("--codec", choices=list(BOUNDS), default="int8", help="(%(default)s)")
    parser.add_argument(
        "--warm", type=int, default=10, help="first rounds that no percentile counts (%(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=1000, help="rounds between lines of progress (%(default)s)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds <= options.warm:
        parser.error(f"--rounds: expected more than the {options.warm} warm ones")
    end_cleanly_when_terminated()
    verdict = judge(soak(options), options)
    print(json.dumps(verdict)) if options.json else show(verdict)
    return int(bool(verdict["violations"]))


if __name__ == "__main__":
    sys.exit(main())
