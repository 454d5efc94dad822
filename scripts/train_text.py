"""Train a small transformer on the Python standard library's own source, by peers, and compare with training alone.

Starts daemons and a trainer for each, as processes. Every peer has a piece of the text that no other has. The loops are
in text_loops.py: plain PyTorch, the same with target batches (`sync`), and the same with DiLoCo (`diloco`).

    scripts/train_text.py                                    # 4 peers, both methods, about two minutes on two cores
    scripts/train_text.py --method diloco --peers 8 --steps 1000 --seed 1
    scripts/train_text.py --json

All make the same number of AdamW steps, each process with one thread. `alone` is one peer with its own batches, `whole`
one process with the batches of all peers; a method closes 0 % of the gap between their losses if its peers learn
nothing from each other. Waiting is the share of the time that the loops stood still for averaging. Bytes are compared
with gradients sent in fp32 after every step. Losses are of files that nobody trains on. Peers end together: one that
missed the last exchange gets it from the others, who stay for that. Exits 1 if a trainer failed, or if peers ended with
different parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench_load import end_cleanly_when_terminated
from text_trainer import ALONE, DILOCO, METHODS, SYNC, WHOLE, Job, TextOptions, Trained

from equipoise.peer.demo.swarm import Child, Family

TRAINER = Path(__file__).with_name("text_trainer.py")

START_SECONDS = 60.0
"""For a daemon to print its address; two seconds on an idle machine."""

TRAIN_SECONDS = 3600.0
"""More than anybody waits for an example."""

END_SECONDS = 15.0
FP32_BYTES = 4


class Broken(Exception):
    """A daemon or a trainer has failed."""


def daemon_command(home: Path, join: Sequence[str]) -> list[str]:
    """The command of a daemon that only this machine can reach."""
    joins = [word for address in join for word in ("--join", address)]
    equipoise = [sys.executable, "-c", "from equipoise.peer.cli import main; main()"]
    return [*equipoise, "daemon", "--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0", *joins]


def start_daemons(family: Family, folder: Path, count: int) -> list[Path]:
    """Start daemons, the others joined to the first, and return their homes."""
    homes = [folder / f"peer{index + 1}" for index in range(count)]
    first = family.start("daemon 1", daemon_command(homes[0], []))
    address = heard(family, [first], "/", START_SECONDS)[first]
    others = [family.start(f"daemon {home.name}", daemon_command(home, [address])) for home in homes[1:]]
    heard(family, others, "/", START_SECONDS)
    return homes


def heard(family: Family, children: Sequence[Child], start: str, seconds: float) -> dict[Child, str]:
    """The first line that begins with `start` of each child.

    Raises:
        Broken: One of them has ended before that, or any child badly; or time is over.
    """
    found: dict[Child, str] = {}
    deadline = time.monotonic() + seconds
    while len(found) < len(children):
        if time.monotonic() > deadline:
            raise Broken(f"waited {seconds:g} s for {', '.join(c.name for c in children if c not in found)}")
        for child, line in family.hear(deadline - time.monotonic()):
            if line is None and child not in found and (child.reap(END_SECONDS) or child in children):
                raise Broken(child.ending)
            if line is not None and child in children and line.startswith(start):
                found.setdefault(child, line)
    return found


def run_job(family: Family, options: TextOptions, method: str, homes: Sequence[Path]) -> list[Trained]:
    """Train by one method and return what came of it, of each trainer.

    Raises:
        Broken: A trainer has failed.
    """
    alone = method in (ALONE, WHOLE)
    trainers = []
    for index, home in enumerate(homes[:1] if alone else homes):
        job = Job(options=options, method=method, index=index)
        command = [sys.executable, str(TRAINER), str(home), msgspec.json.encode(job).decode()]
        trainers.append(family.start(f"{method} trainer {index + 1}", command))
    lines = heard(family, trainers, "{", TRAIN_SECONDS)
    for trainer in trainers:
        if trainer.reap(END_SECONDS) != 0:
            raise Broken(trainer.ending)
    return [msgspec.json.decode(lines[trainer], type=Trained) for trainer in trainers]


def summary(method: str, trained: Sequence[Trained], options: TextOptions) -> dict[str, Any]:
    """What is printed of one method."""
    found: dict[str, Any] = {
        "method": method,
        "held_out_loss": trained[0].loss,
        "tokens_per_s": sum(one.tokens for one in trained) / max(one.seconds for one in trained),
        "seconds": max(one.seconds for one in trained),
    }
    if method in (SYNC, DILOCO):
        sent = sum(one.bytes_sent for one in trained)
        # Of n peers each sends n - 1 of n parts of the vector to their owners, and as much of its own part back.
        fp32 = 2 * (options.peers - 1) * trained[0].values * FP32_BYTES * options.steps
        found |= {
            "samples_per_step": sum(one.tokens for one in trained) / options.length / options.steps,
            "waiting": sum(one.waiting for one in trained) / sum(one.seconds for one in trained),
            "rounds": max(one.rounds for one in trained),
            "failed": sum(one.failed for one in trained),
            "bytes_sent": sent,
            "fewer_bytes": fp32 / sent if sent else 0.0,
            "identical": Counter(one.digest for one in trained).most_common(1)[0][1],
        }
    return found


def gaps(rows: Sequence[dict[str, Any]]) -> None:
    """Note for each method how much of the gap between one peer alone and one process with all batches it closes."""
    losses = {row["method"]: row["held_out_loss"] for row in rows}
    for row in rows:
        if "identical" in row and losses[ALONE] > losses[WHOLE]:
            row["gap_closed"] = (losses[ALONE] - row["held_out_loss"]) / (losses[ALONE] - losses[WHOLE])


def line(row: dict[str, Any]) -> str:
    """One method for people."""
    text = (
        f"{METHODS[row['method']]:38} loss {row['held_out_loss']:.3f}  {row['tokens_per_s']:7,.0f} tokens/s"
    )
    if "identical" not in row:
        return text
    return (
        f"{text}  {row['samples_per_step']:.0f} samples a step  waiting {row['waiting']:4.0%}"
        f"  sent {row['bytes_sent'] / 1e6:7.1f} MB, {row['fewer_bytes']:.0f}x fewer bytes"
        f"  rounds {row['rounds']} (failed {row['failed']})"
        f"  parameters of {row['identical']} alike"
    )


def compare(options: TextOptions, methods: Sequence[str], quiet: bool) -> list[dict[str, Any]]:
    """Train by all methods, one after another.

    Raises:
        Broken: A process has failed.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="train-text-")))
        family = stack.enter_context(Family(folder))
        homes = start_daemons(family, folder, options.peers)
        for method in (ALONE, WHOLE, *methods):
            rows.append(summary(method, run_job(family, options, method, homes), options))
            if not quiet:
                print(line(rows[-1]), flush=True)
    gaps(rows)
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = TextOptions()
    parser.add_argument(
        "--method", choices=[SYNC, DILOCO, "both"], default="both", help="how peers train (%(default)s)"
    )
    parser.add_argument("--peers", type=int, default=default.peers, help="2 to 16 (%(default)s)")
    parser.add_argument("--steps", type=int, default=default.steps, help="AdamW steps of each (%(default)s)")
    parser.add_argument(
        "--samples", type=int, default=default.samples, help="windows in a peer's batch (%(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=default.every, help="steps between DiLoCo's rounds (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=default.seed, help="which windows are drawn (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of lines")
    options = parser.parse_args(arguments)
    if not 2 <= options.peers <= 16:
        parser.error(f"expected --peers from 2 to 16, got {options.peers}")
    if options.method != SYNC and options.steps % options.every:
        parser.error(f"expected --steps to be a multiple of --every {options.every}, got {options.steps}")
    return options


def main() -> int:
    given = parse()
    end_cleanly_when_terminated()
    methods = [SYNC, DILOCO] if given.method == "both" else [given.method]
    names = TextOptions.__struct_fields__
    options = TextOptions(**{name: value for name, value in vars(given).items() if name in names})
    try:
        rows = compare(options, methods, given.json)
    except Broken as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            if "gap_closed" in row:
                print(f"{row['method']} closes {row['gap_closed']:.0%} of the gap between alone and whole")
    return int(any(row.get("identical", options.peers) < options.peers for row in rows))


if __name__ == "__main__":
    sys.exit(main())
