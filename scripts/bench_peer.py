"""One peer of `bench_round.py`: a process with one averaging system, told by lines of JSON what to do next.

Contributions and the true mean come from files, read piece by piece: they do not count as memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from bench_systems import BOUNDS, BYTES_PER_VALUE, Place, Wire, device, make

CHUNK = 1 << 20
"""Values that are read, restored or compared at once."""


def pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """All values in order, `CHUNK` at a time, each with where it begins in the flat vector."""
    start = 0
    for tensor in tensors:
        for piece in torch.split(tensor, CHUNK):
            yield start, piece
            start += piece.numel()


def fill(tensors: Sequence[torch.Tensor], path: Path, scale: float) -> None:
    """Set the tensors to `scale` times the f32 values of a file."""
    for start, piece in pieces(tensors):
        source = np.fromfile(path, np.float32, piece.numel(), offset=4 * start)
        torch.mul(torch.from_numpy(source).to(piece.device), scale, out=piece)


def error(tensors: Sequence[torch.Tensor], path: Path, scale: float) -> float:
    """The 2-norm of what the tensors are off from `scale` times the f64 values of a file, over the norm of those."""
    off = norm = 0.0
    for start, piece in pieces(tensors):
        truth = np.fromfile(path, np.float64, piece.numel(), offset=8 * start) * scale
        off += float(np.square(piece.cpu().numpy() - truth).sum())
        norm += float(np.square(truth).sum())
    return math.sqrt(off / norm)


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

    def last_words(self) -> str:
        """The end of what our daemon has written, for whoever asks why something failed."""
        daemon = getattr(self._system, "daemon", None)
        return "" if daemon is None else f"; its daemon wrote: {daemon.output[-1000:]}{daemon.errors[-1000:]}"

    def memory(self) -> dict[str, float]:
        """Peak resident bytes of all processes of this peer, and of our daemon those that are not shared tensors."""
        me = psutil.Process()
        peak = sum(memory(one)["VmHWM"] for one in [me, *me.children(recursive=True)])
        daemon = getattr(self._system, "daemon", None)
        if daemon is None:
            return {"peak": peak}
        used = memory(psutil.Process(daemon.pid))
        pss = sum(one.memory_full_info().pss for one in (me, psutil.Process(daemon.pid)))
        return {"peak": peak, "daemon": used["VmHWM"] - used["RssShmem"], "pss": pss}

    def close(self) -> None:
        self._system.close()


def main() -> None:
    system, index, shares, values, host, folder, data = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Whatever libraries print is no answer.
    fractions = tuple(map(float, shares.split(",")))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(fractions)))
    peer = Peer(system, Place(int(index), fractions, host, Path(folder)), int(values), Path(data))
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(peer, order)(*arguments)}
        except Exception as failure:  # The parent decides what a failure of a peer means.
            traceback.print_exc()
            answer = {"failure": f"{type(failure).__name__}: {failure}{peer.last_words()}"}
        answers.write(json.dumps(answer) + "\n")
    with contextlib.suppress(Exception):
        peer.close()


if __name__ == "__main__":
    main()
