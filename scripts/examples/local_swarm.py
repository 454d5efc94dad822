"""Runs an example: as one peer of a swarm or, with `--peers N`, as a whole swarm on this machine.

Each example is one function, `train(peer, options)`. It trains on this peer's share of the data and returns what came
of it. Without a peer it trains alone. With `--peers N` this module starts N processes with a daemon each, and then two
that train alone, side by side: with the first peer's share, and with all the data. `--plot FILE` draws what came of all
three.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from equipoise.peer import Peer, Run

LOOPBACK = "/ip4/127.0.0.1/tcp/0"

END_SECONDS = 15.0
"""Time for a peer to leave the swarm."""


class Point(NamedTuple):
    """A moment of one peer's training.

    Attributes:
        seconds: Since the training began.
        loss: Of data that nobody trains on, in nats.
        sent: Bytes sent to other peers so far.
    """

    seconds: float
    loss: float
    sent: int


class Result(NamedTuple):
    """What came of one peer's training.

    Attributes:
        points: Moments of it; the last one is the end.
        digest: Of the parameters that all peers must hold alike.
    """

    points: list[Point]
    digest: str

    @property
    def end(self) -> Point:
        """The end of the training."""
        return self.points[-1]


class Curve:
    """Takes points of a training, which begins with the first one: the others have been found by then."""

    def __init__(self, loss: Callable[[], float]) -> None:
        """`loss` judges the model as it is."""
        self._loss, self._began = loss, 0.0
        self._points: list[Point] = []

    def add(self, run: Run | None) -> None:
        """Take a point; `run` is None where there are no others."""
        self._began = self._began or time.monotonic()
        sent = 0 if run is None else int(run.metrics()["bytes_sent"])
        self._points.append(Point(time.monotonic() - self._began, self._loss(), sent))

    def result(self, tensors: Iterable[torch.Tensor]) -> Result:
        """What came of it, after the last point; all peers must hold these tensors alike."""
        return Result(self._points, digest(tensors))


Train = Callable[[Peer | None, argparse.Namespace], Result]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 in hex over the bytes of tensors."""
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(
    train: Train, description: str, add: Callable[[argparse.ArgumentParser], Any] = lambda _: None
) -> None:
    """Run an example as the command line says; `add` adds options of its own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Unwinds the stack, so that daemons are stopped.
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", type=int, metavar="N", help="run a whole swarm of N peers on this machine")
    parser.add_argument(
        "--join", action="append", default=[], metavar="ADDRESS", help="join a swarm by a peer"
    )
    parser.add_argument("--listen", action="append", default=[], help="where this peer's daemon listens")
    parser.add_argument("--index", type=int, default=0, help="this peer's share of the data, from 0")
    parser.add_argument("--of", type=int, default=1, help="number of shares")
    parser.add_argument("--alone", action="store_true", help="train without others")
    parser.add_argument(
        "--pooled", type=int, default=0, metavar="N", help="with --alone: train with the data of N peers"
    )
    parser.add_argument("--seed", type=int, default=0, help="have all peers draw their data in another order")
    parser.add_argument("--small", action="store_true", help="train for less than a minute")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument(
        "--plot", metavar="FILE", help="with --peers: draw the loss against time and against bytes"
    )
    add(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peers is not None:
        sys.exit(run_swarm(options))
    told = sys.stderr if options.json else sys.stdout
    with contextlib.nullcontext() if options.alone else Peer(options.join, listen=options.listen) as peer:
        if peer is not None:
            print(f"others join by {peer.addresses[0]}", file=told, flush=True)
        result = train(peer, options)
    print(json.dumps(result) if options.json else told_of("this peer", result), flush=True)


def run_swarm(options: argparse.Namespace) -> int:
    """Run a swarm on this machine, and learners alone beside it; returns the exit status."""
    count, rest = options.peers, given(sys.argv[1:])
    if count < 2:
        raise SystemExit(f"expected at least 2 peers, got {count}: give --alone to train alone")
    with children() as start:
        first = start([*rest, "--json", "--listen", LOOPBACK, "--of", str(count)])
        address = awaited(first, "others join by ")
        joins = ["--json", "--listen", LOOPBACK, "--join", address, "--of", str(count), "--index"]
        peers = [result(one) for one in [first, *(start([*rest, *joins, str(at)]) for at in range(1, count))]]
        alone = [start([*rest, "--json", "--alone", data, str(count)]) for data in ("--of", "--pooled")]
        share, whole = map(result, alone)
    ends, alike = [one.end for one in peers], len({one.digest for one in peers}) == 1
    loss, sent = sum(one.loss for one in ends) / count, sum(one.sent for one in ends)
    found = {
        "loss": loss,
        "loss_alone_with_its_share": share.end.loss,
        "loss_alone_with_all_data": whole.end.loss,
        "bytes": sent,
        "seconds": max(one.seconds for one in ends),
        "digest": peers[0].digest if alike else "",
    }
    rows = {f"{count} peers together": peers[0], "alone, its share": share, "alone, all data": whole}
    if options.plot:
        plot(rows, options.plot)
    told = "\n".join(told_of(name, one) for name, one in rows.items())
    equal = "all peers hold equal parameters" if alike else "PEERS HOLD DIFFERENT PARAMETERS"
    print(json.dumps(found) if options.json else f"{told}\n{equal}")
    return 0 if alike else 1


def told_of(name: str, one: Result) -> str:
    seconds, loss, sent = one.end
    return f"{name:20} loss {loss:.4f}  {seconds:6.1f} s  {sent / 1e6:8.2f} MB sent  {one.digest[:8]}"


def plot(rows: dict[str, Result], file: str) -> None:
    """Draw the loss of all against time and, of the peer that is the first row, against what it has sent."""
    from matplotlib.figure import Figure  # Nothing else needs it.

    figure = Figure(figsize=(8, 3), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for name, one in rows.items():
        losses = [point.loss for point in one.points]
        by_time.plot([point.seconds for point in one.points], losses, ".-", label=name)
        if one is next(iter(rows.values())):
            by_bytes.plot([point.sent / 1e6 for point in one.points], losses, ".-")
    by_time.set(xlabel="seconds", ylabel="loss of the test", yscale="log")
    by_time.yaxis.set_major_formatter("{x:.3g}")
    by_time.yaxis.set_minor_formatter("{x:.3g}")
    by_bytes.set(xlabel="MB sent by a peer")
    by_time.legend()
    figure.savefig(file, dpi=90)


def given(arguments: Sequence[str]) -> list[str]:
    """The arguments that a peer of the swarm takes over: all but those for the swarm as a whole."""
    rest, skipped = [], False
    for one in arguments:
        if not skipped and one != "--json" and not one.startswith(("--peers", "--plot")):
            rest.append(one)
        skipped = one in ("--peers", "--plot")
    return rest


@contextlib.contextmanager
def children() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Starts copies of this script, and ends those that still run."""
    started: list[subprocess.Popen[str]] = []

    def start(arguments: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, sys.argv[0], *arguments]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
        )
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.terminate()
        deadline = time.monotonic() + END_SECONDS
        for one in started:
            try:
                one.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                one.kill()


def awaited(child: subprocess.Popen[str], start: str) -> str:
    """The rest of the first line of a child's standard error that begins so."""
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith(start):
            return line.removeprefix(start).strip()
    raise SystemExit("the first peer ended before its daemon had started")


def result(child: subprocess.Popen[str]) -> Result:
    """What came of a child's training; its other output goes to standard error."""
    out, err = child.communicate()
    sys.stderr.write(err)
    if child.returncode:
        raise SystemExit(f"a peer ended with status {child.returncode}: see above")
    points, digested = json.loads(out.splitlines()[-1])
    return Result([Point(*one) for one in points], digested)
