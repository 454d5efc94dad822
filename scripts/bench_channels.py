"""Messages between two scripts beside plain TCP, in turns: throughput of large tensors, latency of small ones.

Real daemons on loopback, and a process for each script. A turn sends so many tensors of 64 MB, with two messages under
way; plain TCP sends the same bytes into memory that is there already. Seconds of all processes are CPU time.

    scripts/bench_channels.py                # 5 turns of each way, 8 tensors of 64 MB, and 300 messages of 1 KB
    scripts/bench_channels.py --megabytes 4 --count 64 --json

Printed are the medians over turns, raw and int8 as shares of plain TCP in the same turn, and the median and the 90th
percentile of the milliseconds from `send` to the return of `receive`.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from bench_load import end_cleanly_when_terminated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from e2e.learners import daemons
from e2e.swarm import Swarm
from equipoise.peer import Run, connect

SECONDS = 120.0
UNDER_WAY = 2
WAYS = ("tcp", "raw", "int8")


def receiver(home: Path) -> int:
    """Receive what the other process sends; tell it by `done` messages when a turn is whole."""
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as server, connect(home) as peer:
        run = peer.join("bench", [torch.zeros(300)])
        print(json.dumps([peer.peer_id, server.getsockname()[1]]), flush=True)
        connection, _ = server.accept()
        with connection:
            while (turn := run.receive("turn", SECONDS)) is not None and turn.fields["way"]:
                size, waits = turn.fields["bytes"], []
                if turn.fields["way"] == "tcp":
                    memory = memoryview(bytearray(size))
                    run.send(turn.sender, "ready").result(SECONDS)
                    for _ in range(turn.fields["count"]):
                        got = 0
                        while got < size:
                            got += connection.recv_into(memory[got:])
                else:
                    run.send(turn.sender, "ready").result(SECONDS)
                    for _ in range(turn.fields["count"]):
                        message = run.receive("data", SECONDS)
                        assert message is not None
                        waits.append(time.monotonic() - message.fields["at"])
                        assert message.tensors["x"].numel() * 4 == size
                run.send(turn.sender, "done", waits=waits).result(SECONDS)
    return 0


def send(run: Run, to: str, way: str, tensor: torch.Tensor, count: int, wire: socket.socket) -> list[float]:
    """Send a turn; returns its seconds, and those of each message from `send` to `receive`."""
    size, under_way = tensor.numel() * 4, []
    run.send(to, "turn", way=way, bytes=size, count=count)
    assert run.receive("ready", SECONDS)
    began = time.monotonic()
    for _ in range(count):
        if way == "tcp":
            wire.sendall(tensor.numpy().data)
            continue
        under_way.append(run.send(to, "data", {"x": tensor}, codec=way, at=time.monotonic()))
        if len(under_way) >= UNDER_WAY or size < 2**20:
            under_way.pop(0).result(SECONDS)
    done = run.receive("done", SECONDS)
    assert done is not None
    return [time.monotonic() - began, *done.fields["waits"]]


def spent(pids: list[int]) -> float:
    """CPU seconds of these processes, and of this one."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in (0, *pids) if pid) + time.process_time()


def figures_of(
    rates: dict[str, list[float]], cpu: dict[str, list[float]], waits: list[float]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    figures = {
        way: {
            "GB/s": round(statistics.median(rates[way]), 3),
            "x": round(statistics.median(a / b for a, b in zip(rates[way], rates["tcp"], strict=True)), 3),
            "s/GB": round(statistics.median(cpu[way]), 2),
        }
        for way in WAYS
    }
    tenths = statistics.quantiles(waits, n=10)
    return figures, {"median": round(1000 * tenths[4], 2), "90%": round(1000 * tenths[8], 2)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5, help="(5)")
    parser.add_argument("--count", type=int, default=8, help="tensors in a turn (8)")
    parser.add_argument("--megabytes", type=int, default=64, help="of a tensor (64)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        return receiver(args.receive)
    end_cleanly_when_terminated()
    torch.set_num_threads(1)
    tensor, gigabytes = torch.randn(args.megabytes * 250_000), args.megabytes * args.count / 1000
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="bench-channels-") as folder:
        swarm = Swarm(Path(folder))
        try:
            here, there = daemons(swarm, 2)
            command = [sys.executable, __file__, "--receive", str(there.home)]
            with (
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child,
                connect(here.home) as peer,
            ):
                assert child.stdout is not None
                to, port = json.loads(child.stdout.readline())
                run = peer.join("bench", [torch.zeros(300)])
                assert run.wait_for(1)
                pids = [here.pid, there.pid, child.pid]
                with socket.create_connection(("127.0.0.1", port)) as wire:
                    for turn in range(args.turns + 1):  # The first one loads and dials.
                        for way in WAYS:
                            before = spent(pids)
                            seconds, *_ = send(run, to, way, tensor, args.count, wire)
                            if turn:
                                rates[way].append(gigabytes / seconds)
                                cpu[way].append((spent(pids) - before) / gigabytes)
                    _, *waits = send(run, to, "raw", torch.zeros(256), 300, wire)
                    run.send(to, "turn", way="").result(SECONDS)
        finally:
            swarm.close()
    figures, latency = figures_of(rates, cpu, waits)
    if args.json:
        print(json.dumps({**figures, "ms": latency}))
    else:
        for way, one in figures.items():
            print(
                f"{way:5} {one['GB/s']:7.3f} GB/s of fp32  {one['x']:6.3f} x tcp  {one['s/GB']:5.2f} CPU s/GB"
            )
        print(
            f"1 KB from send to receive: {latency['median']} ms in the median, {latency['90%']} ms for 90 %"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
