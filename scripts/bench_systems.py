"""The ways to average that `bench_round.py` compares.

A system is named `ours/CODEC`, `gloo`, `hivemind/CODEC`, `wire/CODEC` (plain TCP of as many bytes, in the same pattern:
what the links allow) or `nothing` (which averages nothing, and must be caught). Words may follow `ours/CODEC`: a
channel (`/aead`), the device on which daemons reduce (`/cuda:0`), that of the tensors (`/on-cuda:0`), the kernels of
daemons and trainers (`/torch`). An added `/xN` cuts the vector into N tensors.
"""

from __future__ import annotations

import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from equipoise.compression.choice import ENVIRONMENT, NAMES
from equipoise.peer.config import CHANNELS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

ROUND_SECONDS = 120.0
"""The slowest that is measured, 64 MB of fp32 among eight at 50 Mbit/s, takes less; what takes longer has failed."""

MEET_SECONDS = 60.0
"""Longest time for all peers to find each other through the DHT, and for their daemons to load kernels."""

POLL_SECONDS = 0.0005
"""How finely the moment is known at which hivemind begins to exchange: cheap beside its tenths of a second."""

SCRATCH_BYTES = 1 << 20
"""What the wire's bytes are received over."""

HIVEMIND_PART_BYTES = 4 << 20

BOUNDS = {"fp32": 1e-6, "none": 1e-6, "fp16": 1e-3, "bf16": 1e-2, "int8": 0.010, "nf4": 0.14}
"""The most by which a mean may be off: the 2-norm of the error over that of the mean, on N(0, 1)."""

BYTES_PER_VALUE = {
    "fp32": 4.0,
    "none": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1 + 4 / 128,
    "nf4": 1 / 2 + 2 / 64,
}
"""Of an encoded vector; `int8` has a scale of 4 bytes for every 128 values, `nf4` of 2 for 64."""


WORDS = {
    **dict.fromkeys(CHANNELS, "EQUIPOISE_CHANNEL"),
    **dict.fromkeys(NAMES, ENVIRONMENT),
}
"""The words that follow the codec of ours, each with the variable that it sets; a device follows, too."""

ON = "on-"
"""Begins the word that names the device of the tensors."""


@dataclass(frozen=True)
class Place:
    """Where a peer stands.

    Attributes:
        index: Its number among the peers.
        shares: The fraction of the vector that suits each peer's link.
        host: Its IPv4 address.
        folder: A folder of its own.
    """

    index: int
    shares: tuple[float, ...]
    host: str
    folder: Path

    @property
    def peers(self) -> int:
        """How many peers there are."""
        return len(self.shares)


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

    def __init__(self, tensors: list[torch.Tensor], codec: str = "int8", *words: str) -> None:
        self.tensors, self.codec = tensors, codec
        self.settings = {WORDS.get(word, "EQUIPOISE_DEVICE"): word for word in words}

    def open(self, place: Place, join: str) -> str:
        from e2e.swarm import DaemonProcess

        listen = ["--listen", f"/ip4/{place.host}/tcp/0"]
        os.environ.update(self.settings)  # Kernels are chosen in this process, too.
        home = place.folder / "daemon"
        self.daemon = DaemonProcess(home, os.environ, [join] if join else [], listen)
        self.daemon.start()
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
        if self.tensors[0].is_cuda:
            torch.cuda.synchronize(self.tensors[0].device)  # The decoding was only queued.
        whole = time.perf_counter() - began
        complete = outcome.ok and len(outcome.contributors) == self._place.peers
        exchange = outcome.seconds.get("exchange", math.nan)
        return Measured(
            complete, "" if complete else outcome.reason, whole, exchange, outcome.bytes_sent, outcome.seconds
        )

    def close(self) -> None:
        try:
            self._client.close()
        finally:
            self.daemon.stop()


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
    """Plain TCP of as many bytes as a codec's butterfly sends between each two peers, all of them at once."""

    def __init__(self, tensors: list[torch.Tensor], codec: str = "int8") -> None:
        self.tensors, self.codec = tensors, codec

    def open(self, place: Place, join: str) -> str:
        self._place = place
        self._server = socket.create_server((place.host, 0))
        return f"{place.host}:{self._server.getsockname()[1]}"

    def meet(self, addresses: list[str]) -> None:
        me = self._place.index
        self._sockets: dict[int, socket.socket] = {}
        for other, address in enumerate(addresses[:me]):
            host, _, port = address.partition(":")
            self._sockets[other] = socket.create_connection((host, int(port)), MEET_SECONDS)
            self._sockets[other].sendall(bytes([me]))
        while len(self._sockets) < self._place.peers - 1:
            accepted = self._server.accept()[0]
            self._sockets[accepted.recv(1)[0]] = accepted
        encoded = sum(tensor.numel() for tensor in self.tensors) * BYTES_PER_VALUE[self.codec]
        shares = self._place.shares
        # To each owner what goes into its share, and from each owner the mean of its share: as much either way.
        self._sizes = {other: int(encoded * (shares[me] + shares[other])) for other in self._sockets}
        self._data = memoryview(bytearray(max(self._sizes.values())))

    def round(self) -> Measured:
        return timed(self._pass_all)

    def close(self) -> None:
        for one in [*self._sockets.values(), self._server]:
            one.close()

    def _pass_all(self) -> None:
        threads = [threading.Thread(target=self._send, args=(other,)) for other in self._sockets]
        threads += [threading.Thread(target=self._receive, args=(other,)) for other in self._sockets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, other: int) -> None:
        self._sockets[other].sendall(self._data[: self._sizes[other]])

    def _receive(self, other: int) -> None:
        left, scratch = self._sizes[other], memoryview(bytearray(SCRATCH_BYTES))
        while left:
            got = self._sockets[other].recv_into(scratch, min(left, SCRATCH_BYTES))
            if not got:
                raise ConnectionError("the other end has closed")
            left -= got


def device(host: str) -> str:
    """The network device that a peer at this address uses."""
    return "lo" if host.startswith("127.") else "eth0"


SYSTEMS: dict[str, Callable[..., System]] = {
    "ours": Ours,
    "gloo": Gloo,
    "hivemind": Hivemind,
    "wire": Wire,
    "nothing": Nothing,
}


def problem(name: str) -> str:
    """Why this machine cannot run the system called `name`, in one line; empty if it can."""
    kind, *words = name.split("/")
    if kind not in SYSTEMS:
        return f"expected names that begin with {', '.join(SYSTEMS)}, got {name!r}"
    for word in words[1:] if kind == "ours" else ():
        device = re.fullmatch(r"(?:on-)?cuda(?::(\d+))?", word)
        if device and int(device[1] or 0) >= (count := torch.cuda.device_count()):
            return f"{name}: torch finds {count} CUDA devices on this machine"
        if not device and word not in WORDS and not re.fullmatch(r"x\d+", word):
            return f"{name}: expected cuda[:N], on-cuda[:N], xN or one of {', '.join(WORDS)}, got {word!r}"
    return ""


def make(name: str, values: int) -> System:
    """The system called `name`, over `values` values."""
    kind, *options = name.split("/")
    count = int(options.pop()[1:]) if options and options[-1][:1] == "x" else 1
    device = next((word.removeprefix(ON) for word in options if word.startswith(ON)), "cpu")
    size = values // count
    sizes = [size] * (count - 1) + [values - size * (count - 1)]
    tensors = [torch.zeros(size, device=device) for size in sizes]
    return SYSTEMS[kind](tensors, *(word for word in options if not word.startswith(ON)))
