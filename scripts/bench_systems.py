"""One peer of `bench_round.py`: a process with one averaging system, told by lines of JSON what to do next.

A system is named `ours/CODEC/CHANNEL`, `gloo`, `hivemind/CODEC`, `wire/CODEC` (plain TCP of as many bytes, in the same
pattern: what the links allow) or `nothing` (which averages nothing, and must be caught). An added `/xN` cuts the vector
into N tensors. Contributions and the true mean come from files, read piece by piece: they do not count as
memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

ROUND_SECONDS = 120.0
"""The slowest that is measured, 64 MB of fp32 among eight at 50 Mbit/s, takes less; what takes longer has failed."""

MEET_SECONDS = 60.0
"""Sixteen daemons that import torch on two cores, and find each other through the DHT."""

POLL_SECONDS = 0.0005
"""How finely the moment is known at which hivemind begins to exchange: cheap beside its tenths of a second."""

CHUNK = 1 << 20
"""Values that are read, restored or compared at once."""

HIVEMIND_PART_BYTES = 4 << 20

BOUNDS = {"fp32": 1e-6, "none": 1e-6, "fp16": 1e-3, "bf16": 1e-2, "int8": 0.010}
"""The most by which a mean may be off: the 2-norm of the error over that of the mean, on N(0, 1)."""

BYTES_PER_VALUE = {"fp32": 4.0, "none": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1 + 4 / 256}
"""Of an encoded vector; `int8` has a scale of 4 bytes for every 256 values."""


@dataclass(frozen=True)
class Place:
    """Where a peer stands: its index among `peers`, its IPv4 address, a folder of its own."""

    index: int
    peers: int
    host: str
    folder: Path


@dataclass(frozen=True)
class Measured:
    """What one peer says of one round.

    Attributes:
        ok: Whether it claims to hold the mean.
        reason: Why not.
        whole: Seconds of the whole call.
        exchange: Seconds from the group formed to the mean decoded here.
        payload: Bytes that the system says it has sent; 0 if it does not say.
        phases: Seconds by phase, of systems that tell.
    """

    ok: bool
    reason: str
    whole: float
    exchange: float
    payload: int = 0
    phases: dict[str, float] | None = None


class System(Protocol):
    """One way to average; each peer's process has one. `codec` says how values travel, so how far off a mean may be."""

    tensors: list[torch.Tensor]
    codec: str

    def open(self, place: Place, join: str) -> str:
        """Start, joining through what the first peer's `open` returned; returns what others may need."""

    def meet(self, addresses: list[str]) -> None:
        """Wait until all know each other; `addresses` is what all peers' `open` returned."""

    def round(self) -> Measured:
        """Replace `tensors` by the mean of all peers' tensors."""

    def close(self) -> None:
        """End everything that was started."""


def timed(act: Callable[[], Any]) -> Measured:
    began = time.perf_counter()
    act()
    took = time.perf_counter() - began
    return Measured(True, "", took, took)


class Nothing:
    """Returns at once: shows that results are checked."""

    codec = "int8"

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def open(self, place: Place, join: str) -> str:
        return ""

    def meet(self, addresses: list[str]) -> None:
        pass

    def round(self) -> Measured:
        return timed(lambda: None)

    def close(self) -> None:
        pass


class Ours:
    """`equipoise daemon` as users run it, in a process of its own, and a client of it here."""

    def __init__(self, tensors: list[torch.Tensor], codec: str = "int8", channel: str = "") -> None:
        self.tensors, self.codec, self._channel = tensors, codec, channel

    def open(self, place: Place, join: str) -> str:
        from e2e.swarm import DaemonProcess

        listen = ["--listen", f"/ip4/{place.host}/tcp/0"]
        environment = {**os.environ, **self._settings()}
        home = place.folder / "daemon"
        self.daemon = DaemonProcess(home, environment, [join] if join else [], listen).start()
        self._place = place
        return next(one for one in self.daemon.addresses if place.host in one)

    def meet(self, addresses: list[str]) -> None:
        from e2e.swarm import eventually
        from equipoise.averaging.outcome import Idle
        from equipoise.peer import connect

        others = self._place.peers - 1
        self._client = connect(self.daemon.home)
        self._run = self._client.join(
            "bench", self.tensors, codec=self.codec, group_size=max(2, self._place.peers)
        )
        eventually(
            lambda: isinstance(state := self._run.state, Idle) and state.peers == others,
            f"{others} other peers",
            MEET_SECONDS,
        )

    def round(self) -> Measured:
        began = time.perf_counter()
        outcome = self._run.average(timeout=ROUND_SECONDS)
        whole = time.perf_counter() - began
        complete = outcome.ok and len(outcome.contributors) == self._place.peers
        exchange = outcome.seconds.get("exchange", math.nan)
        return Measured(
            complete, "" if complete else outcome.reason, whole, exchange, outcome.bytes_sent, outcome.seconds
        )

    def close(self) -> None:
        self._client.close()
        self.daemon.stop()

    def _settings(self) -> dict[str, str]:
        from equipoise.peer.config import KEYS

        if self._channel in ("", "libp2p") and "channel" not in KEYS:
            return {}
        if "channel" not in KEYS:
            raise SystemExit(f"this equipoise knows no channel {self._channel!r}, only libp2p")
        return {"EQUIPOISE_CHANNEL": self._channel} if self._channel else {}


class Gloo:
    """torch.distributed's all_reduce over TCP, fp32; the sum is divided outside of what is timed, in its favour."""

    codec = "fp32"

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def open(self, place: Place, join: str) -> str:
        self._place = place
        os.environ["GLOO_SOCKET_IFNAME"] = device(place.host)
        with socket.create_server((place.host, 0)) as server:
            return f"tcp://{place.host}:{server.getsockname()[1]}"

    def meet(self, addresses: list[str]) -> None:
        import torch.distributed as dist

        self._dist = dist
        dist.init_process_group(
            "gloo", init_method=addresses[0], rank=self._place.index, world_size=self._place.peers
        )

    def round(self) -> Measured:
        self._dist.barrier()
        measured = timed(lambda: [self._dist.all_reduce(tensor) for tensor in self.tensors])
        for tensor in self.tensors:
            tensor.div_(self._place.peers)
        return measured

    def close(self) -> None:
        self._dist.destroy_process_group()


class Hivemind:
    """hivemind's DecentralizedAverager: a DHT and an averager, forked from this process, and their p2pd."""

    def __init__(self, tensors: list[torch.Tensor], codec: str = "fp16") -> None:
        self.tensors, self.codec = tensors, codec

    def open(self, place: Place, join: str) -> str:
        import hivemind

        self._place = place
        self._dht = hivemind.DHT(
            initial_peers=[join] if join else [], host_maddrs=[f"/ip4/{place.host}/tcp/0"], start=True
        )
        return next(str(one) for one in self._dht.get_visible_maddrs() if place.host in str(one))

    def meet(self, addresses: list[str]) -> None:
        from hivemind.averaging import DecentralizedAverager
        from hivemind.compression import Float16Compression, NoCompression

        self._averager = DecentralizedAverager(
            self.tensors,
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=self._place.peers,
            min_group_size=2,
            min_matchmaking_time=2.0,
            request_timeout=1.0,
            part_size_bytes=HIVEMIND_PART_BYTES,
            allreduce_timeout=ROUND_SECONDS / 2,
            compression={"fp16": Float16Compression, "none": NoCompression}[self.codec](),
        )

    def round(self) -> Measured:
        from hivemind.averaging.control import AveragingStage

        began = time.perf_counter()
        step = self._averager.step(wait=False, timeout=ROUND_SECONDS / 2, allow_retries=False)
        while not step.done() and step.stage != AveragingStage.RUNNING_ALLREDUCE:
            time.sleep(POLL_SECONDS)
        formed = time.perf_counter()
        try:
            group = step.result(ROUND_SECONDS)
        except Exception as error:  # Whatever it raises, the round has failed, and that is the finding.
            group, reason = None, f"{type(error).__name__}: {error}"
        else:
            reason = f"a group of {len(group or ())}"
        ended = time.perf_counter()
        complete = group is not None and len(group) == self._place.peers
        return Measured(complete, "" if complete else reason, ended - began, ended - formed)

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()


class Wire:
    """Plain TCP of as many bytes as a codec's butterfly with equal shares sends between each two peers, both ways."""

    def __init__(self, tensors: list[torch.Tensor], codec: str = "int8") -> None:
        self.tensors, self.codec = tensors, codec

    def open(self, place: Place, join: str) -> str:
        self._place = place
        self._server = socket.create_server((place.host, 0))
        return f"{place.host}:{self._server.getsockname()[1]}"

    def meet(self, addresses: list[str]) -> None:
        dialled = addresses[: self._place.index]
        self._sockets = []
        for address in dialled:
            host, _, port = address.partition(":")
            self._sockets.append(socket.create_connection((host, int(port)), MEET_SECONDS))
        while len(self._sockets) < self._place.peers - 1:
            self._sockets.append(self._server.accept()[0])
        size = sum(tensor.numel() for tensor in self.tensors)
        self._half = int(size * BYTES_PER_VALUE[self.codec] / self._place.peers)
        self._data = memoryview(bytearray(self._half))

    def round(self) -> Measured:
        return timed(self._both_halves)

    def close(self) -> None:
        for one in [*self._sockets, self._server]:
            one.close()

    def _both_halves(self) -> None:
        # Scatter and gather overlap in a pipelined butterfly: the links see one stream of both.
        threads = [threading.Thread(target=self._send, args=(one,)) for one in self._sockets]
        threads += [threading.Thread(target=self._receive, args=(one,)) for one in self._sockets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, to: socket.socket) -> None:
        for _ in range(2):
            to.sendall(self._data)

    def _receive(self, of: socket.socket) -> None:
        left, scratch = 2 * self._half, memoryview(bytearray(CHUNK))
        while left:
            got = of.recv_into(scratch, min(left, CHUNK))
            if not got:
                raise ConnectionError("the other end has closed")
            left -= got


SYSTEMS: dict[str, Callable[..., System]] = {
    "ours": Ours,
    "gloo": Gloo,
    "hivemind": Hivemind,
    "wire": Wire,
    "nothing": Nothing,
}


def make(name: str, values: int) -> System:
    """The system called `name`, over `values` values."""
    kind, *options = name.split("/")
    count = int(options.pop()[1:]) if options and options[-1][:1] == "x" else 1
    size = values // count
    tensors = [torch.zeros(size) for _ in range(count - 1)] + [torch.zeros(values - size * (count - 1))]
    return SYSTEMS[kind](tensors, *options)


def pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """All values in order, `CHUNK` at a time, each with where it begins in the flat vector."""
    start = 0
    for tensor in tensors:
        for piece in tensor.split(CHUNK):
            yield start, piece
            start += piece.numel()


def fill(tensors: Sequence[torch.Tensor], path: Path, scale: float) -> None:
    """Set the tensors to `scale` times the f32 values of a file."""
    for start, piece in pieces(tensors):
        source = np.fromfile(path, np.float32, piece.numel(), offset=4 * start)
        torch.mul(torch.from_numpy(source), scale, out=piece)


def error(tensors: Sequence[torch.Tensor], path: Path, scale: float) -> float:
    """The 2-norm of what the tensors are off from `scale` times the f64 values of a file, over the norm of those."""
    off = norm = 0.0
    for start, piece in pieces(tensors):
        truth = np.fromfile(path, np.float64, piece.numel(), offset=8 * start) * scale
        off += float(np.square(piece.numpy() - truth).sum())
        norm += float(np.square(truth).sum())
    return math.sqrt(off / norm)


def device(host: str) -> str:
    """The network device that a peer at this address uses."""
    return "lo" if host.startswith("127.") else "eth0"


def sent_bytes(name: str) -> int:
    """Bytes, with all headers, that a device of this network namespace has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        found, _, counters = line.partition(":")
        if found.strip() == name:
            return int(counters.split()[8])
    return 0


def memory(process: psutil.Process) -> dict[str, int]:
    """Bytes: the most that a process has been resident with, and what of that is shared memory now."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return {key: 1024 * int(fields[key].split()[0]) for key in ("VmHWM", "RssShmem")}


class Peer:
    """Does what it is told, one line of JSON after the other."""

    def __init__(self, system: str, place: Place, values: int, data: Path) -> None:
        self._system, self._place, self._data = make(system, values), place, data

    def open(self, join: str) -> str:
        return self._system.open(self._place, join)

    def meet(self, addresses: list[str]) -> None:
        self._system.meet(addresses)

    def restore(self, scale: float) -> int:
        """Contribute anew; returns what the device has sent so far."""
        self._scale = scale
        fill(self._system.tensors, self._data / f"contribution{self._place.index}", scale)
        return sent_bytes(device(self._place.host))

    def round(self) -> dict[str, Any]:
        return asdict(self._system.round())

    def check(self) -> dict[str, Any]:
        codec = self._system.codec
        found = {"encoded": BYTES_PER_VALUE[codec], "sent": sent_bytes(device(self._place.host))}
        if isinstance(self._system, Wire):
            return {**found, "error": 0.0, "bound": 0.0}
        off = error(self._system.tensors, self._data / "truth", self._scale)
        return {**found, "error": off, "bound": BOUNDS[codec]}

    def memory(self) -> dict[str, float]:
        """Peak resident bytes of all processes of this peer, and of our daemon those that are not shared tensors."""
        me = psutil.Process()
        peak = sum(memory(one)["VmHWM"] for one in [me, *me.children(recursive=True)])
        daemon = getattr(self._system, "daemon", None)
        if daemon is None:
            return {"peak": peak}
        used = memory(psutil.Process(daemon.pid))
        return {"peak": peak, "daemon": used["VmHWM"] - used["RssShmem"]}

    def close(self) -> None:
        self._system.close()


def main() -> None:
    system, index, peers, values, host, folder, data = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Whatever libraries print is no answer.
    threads = max(1, (os.cpu_count() or 1) // int(peers))
    torch.set_num_threads(threads)
    peer = Peer(system, Place(int(index), int(peers), host, Path(folder)), int(values), Path(data))
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(peer, order)(*arguments)}
        except Exception as failure:  # The parent decides what a failure of a peer means.
            traceback.print_exc()
            answer = {"failure": f"{type(failure).__name__}: {failure}"}
        answers.write(json.dumps(answer) + "\n")
    with contextlib.suppress(Exception):
        peer.close()


if __name__ == "__main__":
    main()
