"""Time what SIGKILL or SIGSTOP of one of several real daemons in mid-round costs the survivors, and check their mean.

The figure is from the fault to the last survivor's outcome. Faults strike at points of the victim's own round, in every
phase of the exchange alike. Trials whose group closed without the victim, or that struck before or after the exchange,
do not count and are repeated. Every outcome is held to float64 truth, as by scripts/chaos.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from bench_load import end_cleanly_when_terminated

from e2e.chaos.campaign import FAULT_EVERY, Campaign, Plan
from e2e.chaos.faults import ABSENCE, KILL, STOP, Strike
from e2e.chaos.verdict import EXCHANGING, SURVIVORS_SECONDS
from e2e.swarm import Swarm

NAMES = {KILL: "SIGKILL", STOP: "SIGSTOP"}

TIMEOUT = 30.0

MAX_CAMPAIGNS = 6
"""A machine on which so many do not give the trials that were asked for is too busy to measure on."""


def strikes(members: int, values: int, rounds: int, seed: int) -> Iterator[Strike]:
    """The faults of rounds in a swarm of their own that count as trials.

    Raises:
        SystemExit: A promise of a round was broken.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        plan = Plan(seed, rounds, members, values, "int8", tuple(NAMES), TIMEOUT)
        campaign = Campaign(plan, Swarm(Path(folder)))
        try:
            story = campaign.run()
        finally:
            campaign.close()
    if story.violations:
        raise SystemExit("\n".join(story.violations))
    yield from (strike for strike in story.strikes if counts(strike, members))


def counts(strike: Strike, members: int) -> bool:
    """Whether it struck in the exchange, for long enough to be missed, with everyone in the victim's group."""
    lasted = strike.fault.kind == KILL or strike.fault.seconds >= ABSENCE[0]
    groups = [call.outcome.group for call in strike.calls if call.outcome is not None]
    whole = len(groups) == members - 1 and all(strike.victim.peer_id in group for group in groups)
    return strike.phase in EXCHANGING and lasted and whole and strike.survivors_seconds is not None


def row(kind: str, found: list[Strike]) -> dict[str, object]:
    """What the trials of one kind came to."""
    seconds = [took for strike in found if (took := strike.survivors_seconds) is not None]
    outcomes = [call.outcome for strike in found for call in strike.calls if call.outcome is not None]
    return {
        "fault": NAMES[kind],
        "trials": len(seconds),
        "min_s": min(seconds),
        "median_s": statistics.median(seconds),
        "max_s": max(seconds),
        f"within_{SURVIVORS_SECONDS:g}_s": sum(took <= SURVIVORS_SECONDS for took in seconds),
        "contributors": sorted({len(outcome.contributors) for outcome in outcomes}),
        "phases": {phase: sum(strike.phase == phase for strike in found) for phase in EXCHANGING},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5, help="of each fault, at least (%(default)s)")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--values", type=int, default=16_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    end_cleanly_when_terminated()
    found: dict[str, list[Strike]] = {kind: [] for kind in NAMES}
    for attempt in range(MAX_CAMPAIGNS):
        wanted = sum(max(options.trials - len(trials), 0) for trials in found.values())
        if not wanted:
            break
        # Half of the faults fall outside of the exchange, or are pauses that nobody should notice.
        rounds = 2 * FAULT_EVERY * wanted
        for strike in strikes(options.members, options.values, rounds, options.seed + attempt):
            found[strike.fault.kind].append(strike)
    if not all(found.values()):
        raise SystemExit(f"no trial that counts in {MAX_CAMPAIGNS} campaigns: is the machine busy?")
    rows = [row(kind, trials) for kind, trials in found.items()]
    if options.json:
        print(json.dumps(rows))
    else:
        for one in rows:
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in one.items()))


if __name__ == "__main__":
    main()
