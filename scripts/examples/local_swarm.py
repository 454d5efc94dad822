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
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.connection import Connection
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


@dataclass(frozen=True)
class Result:
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
    train: Train,
    description: str,
    add: Callable[[argparse.ArgumentParser], Any] = lambda _: None,
    swarm: Callable[[Train, argparse.Namespace], int] | None = None,
) -> None:
    """Run an example as the command line says.

    Args:
        train: Trains as one peer, or alone.
        description: What the example shows.
        add: Adds options of its own.
        swarm: Runs a whole swarm, and returns the exit status; by default `run_swarm`.
    """
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
    if options.peers is not None:
        if options.peers < 2:
            raise SystemExit(f"expected at least 2 peers, got {options.peers}: give --alone to train alone")
        sys.exit((swarm or run_swarm)(train, options))
    result = train_as(train, options, lambda address: tell(options, f"others join by {address}"))
    print(json.dumps(asdict(result)) if options.json else told_of("this peer", result), flush=True)


def tell(options: argparse.Namespace, line: str) -> None:
    print(line, file=sys.stderr if options.json else sys.stdout, flush=True)


def train_as(train: Train, options: argparse.Namespace, tell_address: Callable[[str], Any]) -> Result:
    """Train as the peer, or the learner alone, that the options describe; tells where others join."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Unwinds the stack, so that daemons are stopped.
    torch.set_num_threads(1)
    with contextlib.nullcontext() if options.alone else Peer(options.join, listen=options.listen) as peer:
        if peer is not None:
            tell_address(peer.addresses[0])
        return train(peer, options)


def run_swarm(train: Train, options: argparse.Namespace) -> int:
    """Run a swarm on this machine, and learners alone beside it; returns the exit status."""
    count = options.peers
    with children(train, options) as start:
        peers = trained_together(start, count)
        share, whole = map(answer, [start(alone=True, of=count), start(alone=True, pooled=count)])
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


def trained_together(start: Callable[..., Connection], count: int) -> list[Any]:
    """What came of the training of each of so many peers, of which all join by the first."""
    first = start(listen=[LOOPBACK], of=count)
    joins = {"listen": [LOOPBACK], "join": [answer(first)], "of": count}
    rest = [start(**joins, index=index) for index in range(1, count)]
    for one in rest:
        answer(one)
    return [answer(one) for one in (first, *rest)]


def told_of(name: str, one: Result) -> str:
    seconds, loss, sent = one.end
    return (
        f"{name:20} loss {loss:.4f}  {seconds:6.1f} s  {sent / 1e6:8.2f} MB sent  {one.digest[:8]}".rstrip()
    )


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


@contextlib.contextmanager
def children(train: Train, options: argparse.Namespace) -> Iterator[Callable[..., Connection]]:
    """Starts processes that train, each with some options of its own, and ends those that still run.

    They are forked from this one, which has imported the libraries: their import takes seconds for each otherwise.
    """
    import_module("torch._dynamo")  # Else each would import it with its optimizer.
    context = multiprocessing.get_context("fork")
    started: list[Any] = []

    def start(**own: Any) -> Connection:
        ours, theirs = context.Pipe()
        given = argparse.Namespace(**{**vars(options), **own})
        started.append(context.Process(target=child, args=(train, given, theirs)))
        started[-1].start()
        theirs.close()
        return ours

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield start
    finally:
        for one in started:
            one.terminate()
        deadline = time.monotonic() + END_SECONDS
        for one in started:
            one.join(max(deadline - time.monotonic(), 0.0))
            one.kill()


def child(train: Train, options: argparse.Namespace, told: Connection) -> None:
    """Tell the swarm this peer's address, if it is a peer, and what came of its training."""
    told.send(train_as(train, options, told.send))


def answer(child: Connection) -> Any:
    """What a child tells next."""
    try:
        return child.recv()
    except EOFError:
        raise SystemExit("a peer ended too early: see above") from None
