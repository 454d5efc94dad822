"""What a step of training costs where averaging goes on meanwhile, on links on which a round takes less than a step.

Peers train the same transformer in three ways, in turns: without averaging, waiting for each step's round, and with
`delay=True`, which applies a round's mean a step later. A fourth, `local`, exchanges after every 20 steps (DiLoCo).
Each peer has a network namespace and a link of its own (root).

    scripts/bench_overlap.py                     # 2 peers, links of 200 Mbit/s, each trainer keeps a core busy
    scripts/bench_overlap.py --accelerator       # ... or waits for most of a step
    scripts/bench_overlap.py --mbit 0 --json     # on loopback, which needs no root
    scripts/bench_overlap.py --mbit 0 --device cuda:0 --width 1024 --samples 512

Times of a step are medians and means, in ms, of the slowest peer; `x` is of the means, against training without
averaging. A mean holds what few steps take long for. What daemon and p2pd use is
of one peer and one step; what the kernel uses for nobody in particular, packets above all, of all of them together.

Where there are as many trainers as cores, a daemon and the kernel that plays the links have only what they take from
the training: that is what training on a CPU costs. With `--accelerator` a step's gradient is that of one window, and
the rest of the step's time is slept: a trainer that hands its step to a GPU and waits for it, without that GPU's
copies. The optimizer's step and all that averaging does in the trainer still run on its core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench_daemons import START_SECONDS, heard
from bench_load import Bystanders, end_cleanly_when_terminated
from bench_overlap_peer import WAYS, WITHOUT, Times, Use, Work

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from e2e.netns import Network, available
from equipoise.peer.demo.swarm import Family

PEER = Path(__file__).with_name("bench_overlap_peer.py")
ACCELERATOR_MS = 300.0
"""A step of the same length as computed by a core, of the default model and batch."""
WORK_SECONDS = 1800.0


@contextlib.contextmanager
def places(peers: int, mbit: float) -> Iterator[list[tuple[str, Callable[[list[str]], list[str]]]]]:
    """Each peer's address, and what makes a command line run there."""
    if not mbit:
        yield [("127.0.0.1", lambda words: words)] * peers
        return
    with Network(hosts=peers) as network:
        for host in network.hosts:
            network.shape(host, mbit)
        yield [(host.address, host.command) for host in network.hosts]


def measure(work: Work, mbit: float) -> tuple[list[Times], float]:
    """Let all peers do their work; what each of them measured, and how many cores others kept busy.

    Raises:
        SystemExit: A process has failed.
    """
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(places(work.peers, mbit))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-overlap-")))
        family = stack.enter_context(Family(folder))
        join: list[str] = []
        for index, (address, placed) in enumerate(hosts):
            words = [sys.executable, "-c", "from equipoise.peer.cli import main; main()", "daemon"]
            words += ["--home", str(folder / f"peer{index}"), "--listen", f"/ip4/{address}/tcp/0"]
            words += ["--direct-listen", f"/ip4/{address}/tcp/0"] if mbit else []
            daemon = family.start(f"daemon {index}", placed([*words, *join]))
            first = heard(family, [daemon], "/", START_SECONDS)[daemon]
            join = join or ["--join", first]
        told = msgspec.json.encode(work).decode()
        trainers = [
            family.start(f"trainer {i}", [sys.executable, str(PEER), str(folder / f"peer{i}"), str(i), told])
            for i in range(work.peers)
        ]
        bystanders = Bystanders()
        lines = heard(family, trainers, "{", WORK_SECONDS)
        others = bystanders.cores()
    return [msgspec.json.decode(line, type=Times) for line in lines.values()], others


def summary(found: Sequence[Times]) -> list[dict[str, Any]]:
    """One entry for each way of training."""
    steps = {way: max(statistics.fmean(one.steps[way]) for one in found) for way in found[0].steps}
    rows = []
    for way, seconds in steps.items():
        rounds = [value for one in found for value in one.rounds[way]]
        uses = [use for one in found for use in one.uses[way]]
        rows.append(
            {
                "way": way,
                "step_ms": 1e3 * max(statistics.median(one.steps[way]) for one in found),
                "mean_ms": 1e3 * seconds,
                "x": seconds / steps[WITHOUT],
                "round_ms": 1e3 * statistics.median(rounds) if rounds else None,
                "cpu_ms": {
                    name: 1e3 * statistics.median(getattr(use, name) for use in uses)
                    for name in Use.__struct_fields__
                },
            }
        )
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Work()
    parser.add_argument(
        "--mbit", type=float, default=200.0, help="rate of each link, 0: loopback (%(default)s)"
    )
    for name, what in (
        ("peers", "number of peers"),
        ("steps", "steps timed in each turn"),
        ("turns", "turns of the ways"),
        ("width", "of the transformer: what a round sends grows with its square"),
        ("samples", "windows of 64 characters in a batch: what a step computes"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(default, name), help=f"{what} (%(default)s)"
        )
    parser.add_argument(
        "--accelerator",
        type=float,
        nargs="?",
        const=ACCELERATOR_MS,
        default=0.0,
        metavar="MS",
        help="a step waits for so long instead of computing (%(const)s)",
    )
    parser.add_argument("--device", default=default.device, help="where the models are (%(default)s)")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=default.ways, help="%(choices)s")
    parser.add_argument("--codec", default=default.codec, help="how values travel (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(arguments)
    if WITHOUT not in options.ways:
        parser.error(f"--ways: {WITHOUT} must be among them: the others are compared with it")
    if options.mbit and available():
        parser.error(f"--mbit: {available()}; --mbit 0 needs none of that")
    return options


def main() -> int:
    options = parse()
    end_cleanly_when_terminated()
    options.accelerator /= 1e3
    work = Work(**{name: getattr(options, name) for name in Work.__struct_fields__})
    found, others = measure(work, options.mbit)
    rows = summary(found)
    if options.json:
        told = {"values": found[0].values, "mbit": options.mbit, "accelerator_ms": 1e3 * work.accelerator}
        print(json.dumps({**told, "others_cores": others, "ways": rows}))
        return 0
    links = f"links of {options.mbit:g} Mbit/s" if options.mbit else "loopback"
    print(f"{work.peers} peers, {found[0].values:,} values, {links}; others kept {others:.2f} cores busy")
    for row in rows:
        used = ", ".join(f"{name} {ms:.0f}" for name, ms in row["cpu_ms"].items())
        rounds = "" if row["round_ms"] is None else f", a round {row['round_ms']:.0f} ms"
        step = f"{row['step_ms']:6.1f} / {row['mean_ms']:6.1f} ms a step, {row['x']:.2f}x"
        print(f"{row['way']:8} {step}{rounds}; CPU ms: {used}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
