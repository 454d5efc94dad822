"""Time rounds of Equipoise beside torch's gloo and hivemind, interleaved, and check every result for being the mean.

Each peer of each system is a process (and what that starts); rounds of all systems take turns, so that whatever else
the machine does hits all alike. All run in a network namespace of their own where that is possible (root), so the bytes
on the wire are theirs; with `--shape` each peer has a namespace and a link of that rate. What the machine's TCP does
about congestion (`net.ipv4.tcp_congestion_control`, printed) then makes a fifth of the time with 4 peers.

    scripts/bench_round.py                                             # 2 and 4 peers, 16M values, int8 and rivals
    scripts/bench_round.py --peers 4 --systems ours/int8/aead gloo     # see bench_systems.py for the names
    scripts/bench_round.py --systems ours/int8 ours/int8/cuda:0        # daemons that reduce on a GPU, beside the CPU
    scripts/bench_round.py --peers 4 --shape 50mbit,200mbit,200mbit,200mbit --systems ours/int8/aead
    scripts/bench_round.py --beside ../before                          # ours of another checkout too, with its .venv

Times of a round are the greatest over its peers. `exchange` is from the group formed to the mean decoded, `call` is the
whole call. hivemind's exchange is its all-reduce, after its matchmaking; gloo has no matchmaking. Exits 1 if a result
is no mean, or a round of ours failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bench_load import Bystanders, cpu_seconds, end_cleanly_when_terminated
from bench_report import Row, summary, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from e2e.netns import Network, available
from equipoise.averaging.partition import Link, balance

PEER = Path(__file__).with_name("bench_peer.py")
DEFAULT_SYSTEMS = ("ours/int8/tls", "ours/int8/aead", "gloo", "hivemind/fp16")
DEFAULT_VALUES = 1 << 24

WARM_ROUNDS = 2
"""Dropped: connections are opened and memory is touched for the first time."""

SETTLE_SECONDS = 0.05
"""After a round, for what it still does in the background: that counts as its CPU, and slows nobody else."""

ANSWER_SECONDS = 180.0
"""More than a round may take; a peer that has not answered by then never will."""

END_SECONDS = 30.0
MEMORY_FOLDER = Path("/dev/shm")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Broken(Exception):
    """A peer has failed, or does not answer."""


class Peer:
    """One process of one system."""

    def __init__(self, command: Sequence[str], threads: int, log: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EQUIPOISE_")}
        environment |= {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self.lost = False
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )

    def tell(self, *order: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended; `hear` says so.
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self) -> Any:
        """The value of its answer.

        Raises:
            Broken: It failed, ended or is silent.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_SECONDS)[0]:
            self.lost = True
            raise Broken(f"no answer within {ANSWER_SECONDS:g} s; {self._tail()}")
        line = self._process.stdout.readline()
        if not line:
            self.lost = True
            raise Broken(f"it has ended; {self._tail()}")
        answer = json.loads(line)
        if "failure" in answer:
            raise Broken(answer["failure"])
        return answer["value"]

    def processes(self) -> list[psutil.Process]:
        me = psutil.Process(self._process.pid)
        return [me, *me.children(recursive=True)]

    def end(self) -> None:
        """Let it close; whatever outlives that is killed."""
        family = self.processes() if self._process.poll() is None else []
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        _, alive = psutil.wait_procs(family, END_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _tail(self) -> str:
        return f"it wrote: {self._log.read_text(errors='replace')[-2000:]}"


class Contestant:
    """One system with its peers."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], folder: Path, shared_wire: bool) -> None:
        self.row = Row(name)
        self.out = False
        self._shared_wire = shared_wire
        threads = max(1, (os.cpu_count() or 1) // len(commands))
        self.peers = [
            Peer(command, threads, folder / f"{name.replace('/', '-')}-{index}.log")
            for index, command in enumerate(commands)
        ]

    def meet(self) -> None:
        """Start, and wait until all peers know each other; a system that cannot is out, and the others go on."""
        began = time.monotonic()
        try:
            first = self._ask(self.peers[:1], "open", "")
            others = self._ask(self.peers[1:], "open", first[0])
            self._ask(self.peers, "meet", first + others)
        except Broken as failure:
            self.row.failures.append(str(failure))
            self.out = True
        taken = f"{time.monotonic() - began:.1f} s"
        print(
            f"{self.row.name}: {'could not start' if self.out else 'started'} after {taken}", file=sys.stderr
        )

    def round(self, number: int) -> None:
        """One round of all peers; the first `WARM_ROUNDS`, and what was no mean, count in no time."""
        # Another scale each time, so that what is left over of an earlier round is not taken for a result.
        scale = (-1) ** number * (1 + number % 5 / 4)
        try:
            sent = self._ask(self.peers, "restore", scale)
            family = [process for peer in self.peers for process in peer.processes()]
            before = cpu_seconds(family)
            said = self._ask(self.peers, "round")
            time.sleep(SETTLE_SECONDS)
            cpu = cpu_seconds(family) - before
            checked = self._ask(self.peers, "check")
        except Broken as failure:
            self.row.failures.append(str(failure))
            self.out = any(peer.lost for peer in self.peers)
            return
        if any(not one["ok"] for one in said):
            self.row.failures.append(next(one["reason"] for one in said if not one["ok"]))
            return
        self.row.encoded = checked[0]["encoded"]
        errors = [one["error"] for one in checked]
        self.row.error = max(self.row.error, *errors)
        # Written so that NaN is wrong too.
        if not all(error <= checked[0]["bound"] for error in errors):
            self.row.wrong.append(f"round {number}: off by {', '.join(f'{error:.1e}' for error in errors)}")
            return
        if number < WARM_ROUNDS:
            return
        after = [one["sent"] for one in checked]
        used = [late - early for late, early in zip(after, sent, strict=True)]
        self._count(said, cpu, used[0] if self._shared_wire else sum(used))

    def _count(self, said: list[dict[str, Any]], cpu: float, wire: int) -> None:
        row = self.row
        row.exchange.append(max(one["exchange"] for one in said))
        row.call.append(max(one["whole"] for one in said))
        row.beyond.append(max(one["whole"] - one["exchange"] for one in said))
        row.cpu.append(cpu)
        row.wire.append(wire)
        if said[0]["phases"]:
            row.phases.append(said[0]["phases"])

    def end(self) -> None:
        """Ask for the peak of memory, and end all processes."""
        if not any(peer.lost for peer in self.peers):
            with contextlib.suppress(Broken):
                self.row.memory = self._ask(self.peers, "memory")
        with ThreadPoolExecutor() as pool:
            list(pool.map(Peer.end, self.peers))

    def _ask(self, peers: Sequence[Peer], *order: Any) -> list[Any]:
        for peer in peers:
            peer.tell(*order)
        answers, failures = [], []
        for peer in peers:  # All are heard even if one fails, so that no answer is taken for the next one's.
            try:
                answers.append(peer.hear())
            except Broken as failure:
                failures.append(f"{self.row.name}: {order[0]}: {failure}")
        if failures:
            raise Broken(failures[0])
        return answers


def write_data(folder: Path, peers: int, values: int) -> None:
    """Every peer's contribution, N(0, 1) from its seed, and their mean in float64."""
    total = np.zeros(values)
    for index in range(peers):
        contribution = np.random.default_rng(index).standard_normal(values, np.float32)
        contribution.tofile(folder / f"contribution{index}")
        total += contribution
    (total / peers).tofile(folder / "truth")


@contextlib.contextmanager
def places(peers: int, links: Sequence[Link]) -> Iterator[tuple[list[str], Callable[[int], list[str]], bool]]:
    """Each peer's address, what to put before its command line, and whether all share one loopback of their own."""
    if links:
        with Network(hosts=peers) as network:
            for host, (up, down) in zip(network.hosts, links, strict=True):
                network.shape(host, up, down)
            yield (
                [host.address for host in network.hosts],
                lambda index: network.hosts[index].command([]),
                False,
            )
    elif available() == "":
        with Network(hosts=1) as network:
            yield ["127.0.0.1"] * peers, lambda index: network.hosts[0].command([]), True
    else:
        yield ["127.0.0.1"] * peers, lambda index: [], True


def bench(options: argparse.Namespace, peers: int, links: Sequence[Link]) -> tuple[list[Row], float]:
    """Run all systems in turns; returns also how many cores others kept busy."""
    # The data lies in memory, lest a disk disturb.
    memory = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    with contextlib.ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=memory)))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        hosts, prefix, shared = stack.enter_context(places(peers, links))
        write_data(data, peers, options.values)
        fractions = balance(links or [(1.0, 1.0)] * peers, [True] * peers)
        contestants = []
        ours = [name for name in options.systems if name.startswith("ours/")]
        entries: list[tuple[str, Path | None]] = [(name, None) for name in options.systems]
        for name, checkout in entries + [(name, options.beside) for name in ours if options.beside]:
            commands = []
            title = f"{name}@{checkout.name}" if checkout else name
            python = str(checkout / ".venv/bin/python") if checkout else sys.executable
            script = checkout / "scripts" / PEER.name if checkout else PEER
            for index, host in enumerate(hosts):
                own = work / f"{title.replace('/', '-')}-{index}"
                own.mkdir()
                words = [name, index, ",".join(map(str, fractions)), options.values, host, own, data]
                commands.append([*prefix(index), python, str(script), *map(str, words)])
            contestant = Contestant(title, commands, work, shared)
            stack.callback(contestant.end)
            contestant.meet()
            contestants.append(contestant)
        bystanders = Bystanders()
        for number in range(WARM_ROUNDS + options.rounds):
            turn = number % len(contestants)
            for contestant in contestants[turn:] + contestants[:turn]:
                if not contestant.out:
                    contestant.round(number)
        others = bystanders.cores()
    return [contestant.row for contestant in contestants], others


def count(text: str) -> int:
    """A number of values: `1000000`, `1M`, `200k`, `2**24`."""
    base, power, exponent = text.partition("**")
    if power:
        return int(int(base) ** int(exponent))
    units = {"k": 10**3, "M": 10**6}
    return int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(text)


def link_rates(text: str) -> list[Link]:
    """Mbit/s up and down from `200mbit`, `20/100mbit` or `50mbit,200mbit,200mbit`."""
    links = []
    for word in text.split(","):
        up, _, down = word.removesuffix("mbit").partition("/")
        links.append((float(up), float(down or up)))
    if not all(rate > 0 for link in links for rate in link):
        raise ValueError(text)
    return links


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, nargs="*", default=[2, 4], help="default: 2 and then 4")
    parser.add_argument("--values", type=count, default=DEFAULT_VALUES, help="such as 1M; default 2**24")
    parser.add_argument(
        "--rounds", type=int, default=10, help=f"besides {WARM_ROUNDS} warm ones (%(default)s)"
    )
    parser.add_argument("--systems", nargs="*", default=list(DEFAULT_SYSTEMS), help="%(default)s")
    parser.add_argument(
        "--shape",
        type=link_rates,
        default=[],
        help="of each link, 200mbit or 20/100mbit for up/down, or one per peer",
    )
    parser.add_argument(
        "--beside",
        type=lambda text: Path(text).resolve(),
        help="a checkout whose ours/... run in the same turns",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of tables")
    options = parser.parse_args(arguments)
    from bench_systems import problem  # imports torch, which `--help` needs not wait for

    if told := next(filter(None, map(problem, options.systems)), ""):
        parser.error(f"--systems: {told}")
    if len(options.shape) > 1 and options.peers != [len(options.shape)]:
        parser.error(f"--shape names {len(options.shape)} links: give --peers {len(options.shape)}")
    if options.shape and available():
        parser.error(f"--shape: {available()}")
    if options.shape:
        codecs = dict.fromkeys(name.split("/")[1] for name in options.systems if name.startswith("ours/"))
        wires = [f"wire/{codec}" for codec in codecs]
        options.systems = list(dict.fromkeys([*options.systems, *wires]))
    return options


def main() -> int:
    options = parse()
    end_cleanly_when_terminated()
    results = []
    for peers in options.peers:
        links = options.shape * peers if len(options.shape) == 1 else options.shape
        rows, others = bench(options, peers, links)
        summaries = [summary(row, rows, options.values, links) for row in rows]
        congestion = CONGESTION.read_text().strip()
        conditions = {"peers": peers, "values": options.values, "shape": links, "congestion": congestion}
        results.append({**conditions, "others_cores": others, "systems": summaries})
        if not options.json:
            way = f"links of {links} Mbit/s up and down, {congestion}" if links else "loopback"
            print(f"{peers} peers, {options.values} values, {way}; others kept {others:.2f} cores busy")
            print(table(summaries), flush=True)
    if options.json:
        print(json.dumps(results))
    printed = [row for result in results for row in result["systems"]]
    return int(any(row["wrong"] or (row["failed"] and row["system"].startswith("ours")) for row in printed))


if __name__ == "__main__":
    sys.exit(main())
