"""Simulate rounds from seeds, or explore small ones exhaustively; the first broken promise is shown, and the exit is 1.

Safety: anything goes wrong anywhere, and still no two members that report ok differ, every mean is exact, everyone
ends by its deadline. Liveness: faults touch only members outside of a core, and all of the core must succeed.
Gossip: exchanges of pairs without faults; how fast the peers' values come together. With random partners and 10 seeds
or more the exit is 1, too, where that is not as random pairs do, within a tenth.
Federated: real daemons and trainers, in virtual time; peers train for milliseconds to minutes, die, and are cut off.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from equipoise.averaging.allreduce.events import Fail, Finish
from equipoise.averaging.options import TOPOLOGIES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fakes.gossip import mix, mixes_as_expected
from simulator.core import Violation
from simulator.explore import Explorer
from simulator.federated import storm
from simulator.scenario import draw_scenario
from simulator.searches import Search, crashes_and_orders, further_faults
from simulator.world import Report, World

JUDGED_SEEDS = 10
"""Fewest seeds whose mean error is judged. The error of a single seed has a deviation of a sixth to a third."""

MODES = {"safety": [False], "liveness": [True], "both": [False, True]}


@dataclass
class Tally:
    """What the rounds of one mode came to."""

    rounds: int = 0
    all_ok: int = 0
    some_ok: int = 0
    members: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    recovery: list[float] = field(default_factory=list)

    def add(self, report: Report) -> None:
        """Count a round."""
        living = [end for end in report.ends if end is not None]
        ok = sum(isinstance(end, Finish) for end in living)
        self.rounds += 1
        self.steps += report.steps
        self.all_ok += bool(living) and ok == len(living)
        self.some_ok += 0 < ok < len(living)
        self.members["ok"] += ok
        self.members["failed"] += len(living) - ok
        self.members["killed"] += len(report.ends) - len(living)
        self.reasons.update(kind(end.reason) for end in living if isinstance(end, Fail))
        self.recovery.append(max(0.0, report.seconds - report.calm_at))

    def summary(self) -> dict[str, object]:
        """What to print."""
        recovery = sorted(self.recovery)
        return {
            "rounds": self.rounds,
            "all living members ok": self.all_ok,
            "some ok": self.some_ok,
            "none ok": self.rounds - self.all_ok - self.some_ok,
            "members": dict(self.members),
            "failed because": dict(self.reasons.most_common()),
            "steps": self.steps,
            "seconds from the last fault to the end, median and most": [
                round(recovery[len(recovery) // 2], 2),
                round(recovery[-1], 2),
            ],
        }


def kind(reason: str) -> str:
    """A reason without names and numbers."""
    return re.sub(r"\d+ of \d+", "few", re.split("[;:]", reason)[0])


def simulate(args: argparse.Namespace, live: bool) -> dict[str, object]:
    """Rounds of consecutive seeds.

    Raises:
        Violation: A promise was broken; the message names the seed.
    """
    tally, began = Tally(), time.perf_counter()
    first = 0 if args.seed is None else args.seed
    for seed in range(first, first + (args.seeds if args.seed is None else 1)):
        world = World(draw_scenario(seed, args.members, live), keep_story=args.story)
        try:
            tally.add(world.run())
        except Violation as violation:
            raise Violation(f"seed {seed}: {violation}{again(args, seed, live)}") from violation
        finally:
            if args.story:
                print(*world.scenario.faults, *world.story, sep="\n")
    seconds = time.perf_counter() - began
    return {
        "mode": "liveness" if live else "safety",
        **tally.summary(),
        "rounds per second": round(tally.rounds / seconds, 1),
    }


def again(args: argparse.Namespace, seed: int, live: bool) -> str:
    """How to see a seed's story."""
    mode = "liveness" if live else "safety"
    members = "-".join(map(str, args.members))
    return f"\nsee scripts/simulate.py --mode {mode} --members {members} --seed {seed} --story"


def gossip(args: argparse.Namespace) -> int:
    """Show the mean over exchanges of consecutive seeds; return the exit status.

    Raises:
        Violation: A promise was broken; the message names the seed.
    """
    found = []
    for seed in range(args.seeds):
        try:
            found.append(mix(args.peers, args.topology, args.exchanges, seed))
        except Violation as violation:
            raise Violation(f"seed {seed}: {violation}") from violation
    error = {after: fmean(one.error[after] for one in found) for after in found[0].error}
    totals = {
        "error": {str(after): one for after, one in error.items()},
        "in_doubt": sum(one.in_doubt for one in found),
        "messages_per_exchange": round(fmean(one.messages for one in found), 2),
    }
    show(totals, args.json)
    judged = args.topology == "random" and len(found) >= JUDGED_SEEDS
    if judged and not mixes_as_expected(error, args.peers):
        print("the error is not that of random pairs, within a tenth", file=sys.stderr)
        return 1
    return 0


def federated(args: argparse.Namespace) -> dict[str, object]:
    """Federated rounds of consecutive seeds.

    Raises:
        Violation: A promise was broken; the message names the seed.
    """
    logging.getLogger("equipoise").setLevel(logging.ERROR)  # Faults give each daemon much to warn of.
    began, totals = time.perf_counter(), Counter[str]()
    for seed in range(args.seeds) if args.seed is None else [args.seed]:
        try:
            totals.update({"seeds": 1, **storm(seed).counts})
        except Violation as violation:
            raise Violation(f"seed {seed}: {violation}") from violation
    return {**totals, "seconds": round(time.perf_counter() - began, 1)}


def explore(search: Search) -> dict[str, object]:
    """One exhaustive search.

    Raises:
        Violation: A promise was broken; the message holds the way there.
    """
    began = time.perf_counter()
    findings = Explorer(search).run()
    return {
        "search": search.describe(),
        "states": findings.states,
        "steps": findings.steps,
        "ends": dict(findings.ends.most_common()),
        "seconds": round(time.perf_counter() - began, 1),
    }


def sizes(text: str) -> tuple[int, int]:
    """`4` or `2-16`."""
    least, _, most = text.partition("-")
    return int(least), int(most or least)


def show(found: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found), flush=True)
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.items()), flush=True)
        print()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=("rounds", "gossip", "federated"), default="rounds")
    parser.add_argument("--seeds", type=int, help="rounds a mode, federated runs (2000), gossip (10)")
    parser.add_argument("--members", type=sizes, default=(2, 16), help="group sizes (2-16)")
    parser.add_argument("--mode", choices=MODES, default="both")
    parser.add_argument("--seed", type=int, help="only this seed")
    parser.add_argument("--story", action="store_true", help="print what happened, event by event")
    parser.add_argument(
        "--exhaustive", type=int, choices=(2, 3), metavar="N", help="explore groups of 2 or 3"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--peers", type=int, default=64, help="that gossip (64)")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="random", help="of gossip (random)")
    parser.add_argument(
        "--exchanges", type=int, default=256, help="of all peers that gossip, in each run (256)"
    )
    args = parser.parse_args()
    if args.peers < 2 or args.exchanges < 1 or (args.seeds is not None and args.seeds < 1):
        parser.error("expected --peers of at least 2, and --exchanges and --seeds of at least 1")
    args.seeds = args.seeds or (10 if args.what == "gossip" else 2000)
    try:
        if args.what == "gossip":
            return gossip(args)
        elif args.what == "federated":
            show(federated(args), args.json)
        elif args.exhaustive is not None:
            for search in [*crashes_and_orders(args.exhaustive), *further_faults(args.exhaustive)]:
                show(explore(search), args.json)
        else:
            for live in MODES[args.mode]:
                show(simulate(args, live), args.json)
    except Violation as violation:
        print(f"broken promise: {violation}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
