"""Break real daemons in the midst of their rounds, and hold every outcome to float64 truth from all the tensors.

Faults are drawn from a seed: SIGKILL, SIGSTOP and SIGCONT, a graceful restart, p2pd killed, and with root and iproute2
a link that is cut, loses what its peer sends, or is slow. They strike at points of the victim's own round. Every second
round has one. Printed are figures, every promise that was broken, the verdict, and the command that runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from bench_load import end_cleanly_when_terminated

from e2e.chaos.campaign import Campaign, Plan, Story
from e2e.chaos.faults import KINDS, NEED_LINKS
from e2e.chaos.residue import residue
from e2e.chaos.verdict import Verdict, table
from e2e.chaos.wires import Wires
from e2e.netns import Network, available
from e2e.swarm import Swarm


def campaign(plan: Plan, folder: Path, links: bool, verbose: bool) -> Story:
    """Run it all, end every process, and look at what is left behind."""
    swarm = Swarm(folder)
    with contextlib.ExitStack() as stack:
        wires = Wires(stack.enter_context(Network(plan.peers))) if links else None
        say = (lambda line: print(line, file=sys.stderr, flush=True)) if verbose else (lambda line: None)
        running = Campaign(plan, swarm, wires, say)
        try:
            story = running.run()
        finally:
            left = running.close()
        story.left = [*left, *residue(running.pids)]
    return story


def kinds_of(text: str) -> tuple[str, ...]:
    """`kill,stop`."""
    kinds = tuple(text.split(","))
    if unknown := set(kinds) - set(KINDS):
        raise argparse.ArgumentTypeError(
            f"expected some of {','.join(KINDS)}, got {','.join(sorted(unknown))}"
        )
    return kinds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--rounds", type=int, default=60, help="every second with a fault (%(default)s)")
    parser.add_argument(
        "--peers", type=int, default=4, choices=range(3, 17), metavar="3..16", help="(%(default)s)"
    )
    parser.add_argument("--values", type=int, default=200_000, help="fp32 values per peer (%(default)s)")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--faults", type=kinds_of, default=KINDS, help=",".join(KINDS))
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds, of each call (%(default)g)")
    parser.add_argument(
        "--leniency", type=float, default=1.0, help="multiplies bounds in seconds, where other programs run"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for homes, logs, and calls.txt; default: a temporary one"
    )
    parser.add_argument("--verbose", action="store_true", help="name each fault as it strikes")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    args = parse()
    end_cleanly_when_terminated()
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    why_not = available() if set(args.faults) & set(NEED_LINKS) else "not asked for"
    kinds = tuple(kind for kind in args.faults if not why_not or kind not in NEED_LINKS)
    left_out = [kind for kind in args.faults if kind not in kinds]
    plan = Plan(seed, args.rounds, args.peers, args.values, args.codec, kinds, args.timeout)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        story = campaign(plan, folder, not why_not, args.verbose)
        figures = Verdict(story, args.leniency).figures()
        (folder / "calls.txt").write_text("".join(f"{line}\n" for line in story.lines()))
    again = ["python", *sys.argv, *([] if args.seed is not None else ["--seed", str(seed)])]
    figures["left_out"] = f"{', '.join(left_out)}: {why_not}" if left_out else ""
    figures["again"] = shlex.join(again)
    print(json.dumps(figures) if args.json else table(figures))
    return 1 if figures["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
