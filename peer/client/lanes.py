"""Where the values of a run are encoded and decoded: on the host, or on the GPU that holds them.

On a GPU, only codes cross its link to the host.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from equipoise.averaging.layout import Layout
from equipoise.averaging.partition import Part
from equipoise.compression import Codec, CodecError, kernels_for
from equipoise.compression.blockwise import clamped
from equipoise.peer.shared_memory import Region

LINKED = ("cuda",)
"""Types of the devices that encode and decode their own tensors. Tensors of other devices pass through the host."""

PORTABLE = 1
"""cudaHostRegisterPortable: the memory counts as pinned for all devices."""


class Lane:
    """Encodes and decodes parts of one vector on the host, at once.

    Attributes:
        room: Scratch memory for the values of a part, f32.
        dense: Scratch memory for the values of a tensor that is not contiguous and is encoded by itself, f32.
    """

    room: torch.Tensor
    dense: torch.Tensor

    def __init__(
        self,
        layout: Layout,
        stored: memoryview,
        parts: Collection[Part],
        dense: int,
        shares: Sequence[float] = (1.0,),
    ) -> None:
        """Take an encoded vector to write, or a mean of contributions with these shares to read.

        Args:
            stored: u8 [`encoded_size`], or [`mean_size`].
            parts: What is encoded or decoded together, at least one part.
            dense: Most values of a tensor that needs `dense`.
            shares: In member order.
        """
        self._layout, self._stored, self._shares = layout, stored, shares
        self._notes: list[int | torch.Tensor] = []
        self._squares = 0.0
        codes = max(sum(place.stop - place.start for place in self._places(part)) for part in parts)
        self._allocate(max(part.size for part in parts), codes, dense)

    def _allocate(self, values: int, codes: int, dense: int) -> None:
        self.room, self.dense = (torch.from_numpy(np.empty(n, np.float32)) for n in (values, dense))

    def launch(self, work: Callable[..., None], *args: Any) -> None:
        """Call `work` with this lane and the arguments."""
        work(self, *args)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for the end of all that was launched."""
        return lambda: None

    def wait(self) -> None:
        """Wait for the end of all that was launched."""
        self.mark()()

    def clamped(self) -> int | None:
        """How many values were clamped, or None if a value was not finite; waits for the encoding."""
        return sum(note for note in self._notes if isinstance(note, int))

    def squares(self) -> float:
        """The sum of the squares of the encoded values, once the encoding has ended."""
        return self._squares

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy tensors of equal shapes, converted to the dtypes of the targets: on a GPU, by few kernels."""
        torch._foreach_copy_(targets, sources)

    def encode(self, part: Part, values: torch.Tensor) -> None:
        """Encode the values of a part, f32 [n], to its places in the vector."""
        codec, codes = self._layout.codec_of(part), self._stored[self._place(part)]
        self._notes.append(codec.encode(values, codes))
        self._squares += _squares(codec, codes, part.size)  # The codes are still in the cache.

    def decode(self, part: Part, out: torch.Tensor) -> None:
        """Decode a part into `out`, f32 [n]."""
        pieces = [self._stored[place] for place in self._places(part)]
        mean = pieces[0] if len(pieces) == 1 else bytearray().join(pieces)
        self._layout.codec_of(part).decode_mean(mean, self._shares, out)

    def _place(self, part: Part) -> slice:
        return self._layout.encoded(part.start, part.stop)

    def _places(self, part: Part) -> list[slice]:
        return self._layout.mean(part.start, part.stop, len(self._shares))


class DeviceLane(Lane):
    """Encodes and decodes on one CUDA device, by work that is queued there."""

    def __init__(
        self,
        layout: Layout,
        stored: memoryview,
        parts: Collection[Part],
        dense: int,
        shares: Sequence[float],
        device: torch.device,
        aside: bool,
    ) -> None:
        """Work on the device's current stream, or `aside`: on a stream of our own, which first waits for that one."""
        self.device = device
        self._enter(aside)
        self._host = torch.frombuffer(stored, dtype=torch.uint8)
        self._norms: list[torch.Tensor] = []
        super().__init__(layout, stored, parts, dense, shares)

    def _enter(self, aside: bool) -> None:
        self._stream = torch.cuda.current_stream(self.device)
        if aside:
            current, self._stream = self._stream, _side(self.device)
            self._stream.wait_stream(current)

    def _current(self) -> contextlib.AbstractContextManager[None]:
        """Make the lane's device and stream the current ones."""
        return torch.cuda.stream(self._stream)

    def _allocate(self, values: int, codes: int, dense: int) -> None:
        # Memory of torch's allocator belongs to the stream that was current: the next call on it has the same.
        with self._current():
            empty = partial(torch.empty, device=self.device)
            self.room, self.dense = (empty(n, dtype=torch.float32) for n in (values, dense))
            self._codes = empty(codes, dtype=torch.uint8)

    def launch(self, work: Callable[..., None], *args: Any) -> None:
        """Call `work`, which queues operations; see `Lane.launch`."""
        with self._current():
            work(self, *args)

    def mark(self) -> Callable[[], None]:
        """See `Lane.mark`; the function also keeps the memory of the vector."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return partial(_wait, event, self._host)

    def clamped(self) -> int | None:
        """See `Lane.clamped`; there is one read from the device."""
        notes = [note for note in self._notes if isinstance(note, torch.Tensor)]
        with self._current():
            noted = clamped(torch.cat(notes)) if notes else 0
        reported = super().clamped()
        return None if noted is None or reported is None else noted + reported

    def squares(self) -> float:
        """See `Lane.squares`; there is one read from the device."""
        with self._current():
            return float(torch.stack(self._norms).square().sum()) if self._norms else 0.0

    def encode(self, part: Part, values: torch.Tensor) -> None:
        """See `Lane.encode`; what is not finite shows in `clamped`."""
        host = self._host[self._place(part)]
        codec, codes = self._layout.codec_of(part), self._codes[: host.numel()]
        decoded = torch.empty_like(values)
        self._notes.append(codec.begin_encode(values, codes))
        self._move(host, codes)
        codec.begin_decode(codes, decoded)
        self._norms.append(torch.linalg.vector_norm(decoded, dtype=torch.float64))

    def decode(self, part: Part, out: torch.Tensor) -> None:
        """See `Lane.decode`; codes that no encoder writes are not told."""
        stop = 0
        for place in self._places(part):
            start, stop = stop, stop + place.stop - place.start
            self._move(self._codes[start:stop], self._host[place])
        self._layout.codec_of(part).begin_decode_mean(self._codes[:stop], self._shares, out)

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy over the link."""
        target.copy_(source, non_blocking=True)


def _squares(codec: Codec, codes: memoryview, count: int) -> float:
    """The sum of the squares of `count` values; infinite if something else writes to the codes meanwhile.

    The round then finds out whether they are sound.
    """
    try:
        return abs(codec.squares(codes, count))
    except CodecError:
        return math.inf


def linked(tensor: torch.Tensor) -> torch.device | None:
    """The device on which a tensor is encoded; None for the host."""
    return tensor.device if tensor.device.type in LINKED else None


def prepare(codec: Codec, device: torch.device) -> None:
    """Encode and decode for the first time, which loads and probes kernels.

    Triton compiles variants for whether sizes and addresses are multiples of 16: there are values of each kind.
    """
    granule = codec.granule
    for count in (granule, granule + 1, 15 * granule + 1, 16 * granule):
        values = torch.zeros(count, dtype=torch.float32, device=device)
        payload = bytearray(codec.encoded_size(count))
        codec.encode(values, payload)
        codec.decode(payload, values)


def kernels_of(device: torch.device) -> str:
    """The kernels that encode and decode tensors of a device, in one line; see `kernels_for`."""
    if device.type in ("cpu", *LINKED):
        return kernels_for(device)
    return f"{kernels_for(torch.device('cpu'))}, by the CPU, for {device.type}"


def pin(region: Region, devices: Collection[torch.device]) -> None:
    """Register a run's memory with CUDA, if tensors are there, so that copies need no staging.

    If CUDA refuses, it stages the copies itself, through a small pinned buffer of its own: they are correct, and
    slower. The memory is unregistered before it is unmapped, and only by the process that registered it.
    """
    if not devices:
        return
    address = np.frombuffer(region.contribution, np.uint8).ctypes.data
    with _on(devices):
        if int(_cudart().cudaHostRegister(address, 2 * region.size, PORTABLE)) == 0:
            weakref.finalize(region, _unpin, address, tuple(devices), os.getpid())
            return
        with contextlib.suppress(RuntimeError):  # The next launch would raise that error.
            torch.zeros(1, device=next(iter(devices)))


def _unpin(address: int, devices: Sequence[torch.device], process: int) -> None:
    if os.getpid() == process:
        for device in devices:
            torch.cuda.synchronize(device)  # A copy may still read the memory.
        with _on(devices):
            _cudart().cudaHostUnregister(address)


def _on(devices: Collection[torch.device]) -> contextlib.AbstractContextManager[None]:
    """Make one of the devices current: a call of CUDA would make a context on the device that is, of hundreds of MB."""
    return torch.cuda.device(next(iter(devices)))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _wait(event: torch.cuda.Event, _kept: torch.Tensor) -> None:
    event.synchronize()


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this process encodes: one for all runs, because each stream keeps memory of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
