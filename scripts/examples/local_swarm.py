"""Runs an example: as one peer of a swarm or, with `--peers N`, as a whole swarm on this machine.

Each example is one function, `train(peer, options)`. It trains on this peer's share of the data and returns what came
of it. Without a peer it trains alone. With `--peers N` this module starts N processes with a daemon each, and then two
that train alone: with the first peer's share, and with all the data.
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

from equipoise.peer import Peer

LOOPBACK = "/ip4/127.0.0.1/tcp/0"

END_SECONDS = 15.0
"""Time for a peer to leave the swarm."""


class Result(NamedTuple):
    """What came of one peer's training.

    Attributes:
        loss: Of data that nobody trains on, in nats.
        sent: Bytes sent to other peers.
        seconds: Time that the training took.
        digest: Of the parameters that all peers must hold alike.
    """

    loss: float
    sent: int
    seconds: float
    digest: str


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
    parser.add_argument("--small", action="store_true", help="train for less than a minute")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
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
    print(json.dumps(result._asdict()) if options.json else told_of("this peer", result), flush=True)


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
        share = result(start([*rest, "--json", "--alone", "--of", str(count)]))
        whole = result(start([*rest, "--json", "--alone"]))
    loss, alike = sum(one.loss for one in peers) / count, len({one.digest for one in peers}) == 1
    found = {
        "loss": loss,
        "loss_alone_with_its_share": share.loss,
        "loss_alone_with_all_data": whole.loss,
        "bytes": sum(one.sent for one in peers),
        "seconds": max(one.seconds for one in peers),
        "digest": peers[0].digest if alike else "",
    }
    rows = {f"{count} peers together": peers[0]._replace(loss=loss), "alone, its share": share}
    told = "\n".join(told_of(name, one) for name, one in (rows | {"alone, all data": whole}).items())
    equal = "all peers hold equal parameters" if alike else "PEERS HOLD DIFFERENT PARAMETERS"
    print(json.dumps(found) if options.json else f"{told}\n{equal}")
    return 0 if alike else 1


def told_of(name: str, one: Result) -> str:
    return f"{name:20} loss {one.loss:.4f}  {one.seconds:6.1f} s  {one.sent / 1e6:8.2f} MB sent  {one.digest[:8]}"


def given(arguments: Sequence[str]) -> list[str]:
    """The arguments that a peer of the swarm takes over: all but `--peers N` and `--json`."""
    rest, skipped = [], False
    for one in arguments:
        if not skipped and one != "--json" and not one.startswith("--peers"):
            rest.append(one)
        skipped = one == "--peers"
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
    return Result(**json.loads(out.splitlines()[-1]))
