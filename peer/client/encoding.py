"""Tensors to the encoded vector that a script shares with its daemon, and back.

A large tensor is encoded from its own memory and decoded into it, piece by piece. Small tensors pass through scratch
memory, many at a time, as do tensors that no codec takes as they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from equipoise.averaging.layout import Layout
from equipoise.averaging.partition import Part
from equipoise.averaging.schema import SchemaError
from equipoise.compression import NonFiniteError
from equipoise.peer.client.lanes import DeviceLane, Lane, linked

SPAN_VALUES = 512 * 1024
"""Most values that are encoded together: few enough to stay in the cache with their codes."""

LANE_VALUES = 8 * 1024 * 1024
"""Most values that a GPU encodes together: a copy of their codes takes longer than to launch the next."""

LARGE_VALUES = 64 * 1024
"""Fewest values of a tensor that is encoded by itself: the fixed cost of a call is small beside them."""


class Piece(NamedTuple):
    """The values `start` to `stop` of a tensor, of which the first lies at `place` of the flat vector."""

    name: str
    start: int
    stop: int
    place: int
    buffer: bool


class Span(NamedTuple):
    """What is encoded together: a piece of a large tensor, or several small tensors.

    Attributes:
        part: Where it lies in the flat vector, with the padding behind it.
        pieces: In the order of their places.
    """

    part: Part
    pieces: list[Piece]


Devices: TypeAlias = "tuple[torch.device | None, ...]"
"""The device of each place of a layout; None is the host."""

Plan: TypeAlias = "dict[torch.device | None, list[Span]]"

Lanes: TypeAlias = "list[tuple[Lane, list[Span]]]"


class Encoded(NamedTuple):
    """What an encoding has left: how many values were `clamped`, and the 2-norm of the encoded values."""

    clamped: int = 0
    norm: float = math.inf


class Encoder:
    """Encodes the tensors of one `layout`, and decodes them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        on_host = (None,) * len(layout.places)
        self._spans = _spans(layout, on_host)
        self._planned: tuple[Devices, Plan] = on_host, self._spans
        self._unsettled: list[Callable[[], None]] = []

    def encode(self, tensors: Mapping[str, torch.Tensor], out: memoryview, divisor: float = 1.0) -> Encoded:
        """Encode checked tensors, converted to fp32.

        Args:
            tensors: By name, all of the schema.
            out: The encoded vector, u8 [`encoded_size`]. It is complete, also on a GPU, when this returns.
            divisor: What the values of all tensors but buffers are divided by.

        Raises:
            SchemaError: A tensor holds NaN or Inf (also one that overflows fp32); `out` is then undefined.
        """
        given = {name: tensor.detach() for name, tensor in tensors.items()}
        found = self._encode(self._lanes(self._plan(given), given, out, aside=True), given, divisor)
        # The host names the value that is not finite.
        return (
            found
            or self._encode(self._lanes(self._spans, given, out, aside=True), given, divisor)
            or Encoded()
        )

    def _encode(self, lanes: Lanes, tensors: Mapping[str, torch.Tensor], divisor: float) -> Encoded | None:
        """Encode the spans of all lanes; None if a GPU found a value that is not finite."""
        with contextlib.ExitStack() as waiting:
            for lane, spans in lanes:
                waiting.callback(lane.wait)
                for span in spans:
                    lane.launch(self._encode_span, span, tensors, divisor)
        counts = [lane.clamped() for lane, _ in lanes]
        if None in counts:
            return None
        return Encoded(sum(filter(None, counts)), math.sqrt(sum(lane.squares() for lane, _ in lanes)))

    def _encode_span(
        self, lane: Lane, span: Span, tensors: Mapping[str, torch.Tensor], divisor: float
    ) -> None:
        take = _alone if len(span.pieces) == 1 else _together
        values = take(lane, span, tensors, divisor)
        for part, some in self._granules(span.part, values):
            try:
                lane.encode(part, some)
            except NonFiniteError as error:
                name, at = self.layout.locate(part.start + error.index)
                told = f"tensor {name!r} holds {error.value} at flat index {at}"
                raise SchemaError(f"{told}: expected finite values within fp32's range") from None

    def _granules(self, part: Part, values: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """Cut a part into its whole granules of values, f32 [n], and the rest: a copy of those, and zeros."""
        head, rest = self._cut(part, values.numel())
        if head.size:
            yield head, values[: head.size]
        if rest.size:
            padded = values.new_zeros(rest.size)
            padded[: values.numel() - head.size] = values[head.size :]
            yield rest, padded

    def _cut(self, part: Part, count: int) -> tuple[Part, Part]:
        """Cut a part behind the whole granules of its `count` values, or at its end if no padding follows them."""
        whole = count if count == part.size else count - count % self.layout.codec.granule
        return Part(part.start, part.start + whole, part.owner), Part(
            part.start + whole, part.stop, part.owner
        )

    def decode(
        self, stored: memoryview, tensors: Mapping[str, torch.Tensor], shares: Sequence[float] = (1.0,)
    ) -> None:
        """Decode an encoded mean, u8 [`mean_size`], into checked tensors in place, all of the schema.

        On a GPU this only queues: `stored` must not change before `settle`.

        Args:
            stored: The mean of contributions with these `shares`; by default one contribution.
            tensors: By name, all of the schema.
            shares: In member order, above 0.

        Raises:
            CodecError: No encoder writes such a vector, and the host decodes it; its tensors are then undefined. A GPU
                decodes any vector: this peer's daemon has checked each part of a mean.
        """
        given = {name: tensor.detach() for name, tensor in tensors.items()}
        lanes = self._lanes(self._plan(given), given, stored, False, shares)
        try:
            for lane, spans in lanes:
                for span in spans:
                    lane.launch(self._decode_span, span, given)
        finally:
            self._unsettled += [lane.mark() for lane, _ in lanes if isinstance(lane, DeviceLane)]

    def settle(self) -> None:
        """Wait until no device reads any more from what was given to `decode`."""
        while self._unsettled:
            self._unsettled.pop()()

    def _decode_span(self, lane: Lane, span: Span, tensors: Mapping[str, torch.Tensor]) -> None:
        part, pieces = span
        room = lane.room[: part.size]
        if len(pieces) > 1:
            lane.decode(part, room)
            targets = [tensors[piece.name] for piece in pieces]
            places = (_place(piece, part, room) for piece in pieces)
            lane.copy(targets, [one.view(to.shape) for one, to in zip(places, targets, strict=True)])
            return
        name, start, stop, *_ = pieces[0]
        tensor, flat = tensors[name], _flat(lane, tensors[name])
        target = flat[start:stop]
        head, rest = self._cut(part, target.numel() if _is_plain(target, room) else 0)
        if head.size:
            # What autograd has saved counts as changed: compiled kernels do not say so.
            target[:0].zero_()
            lane.decode(head, target[: head.size])
        if head.size < target.numel():
            lane.decode(rest, room[head.size :])
            target[head.size :].copy_(room[head.size : target.numel()])
        if stop == tensor.numel() and not _is_dense(tensor):
            tensor.copy_(flat.view(tensor.shape))

    def _plan(self, tensors: Mapping[str, torch.Tensor]) -> Plan:
        devices = tuple(linked(tensors[place.tensor.name]) for place in self.layout.places)
        if devices != self._planned[0]:
            self._planned = devices, _spans(self.layout, devices)
        return self._planned[1]

    def _lanes(
        self,
        plan: Plan,
        tensors: Mapping[str, torch.Tensor],
        stored: memoryview,
        aside: bool,
        shares: Sequence[float] = (1.0,),
    ) -> Lanes:
        """A lane for each device that has spans; the host's is the last, so that the others work meanwhile."""
        lanes: Lanes = []
        for device, spans in sorted(plan.items(), key=lambda item: item[0] is None):
            if spans:
                alone = (tensors.get(span.pieces[0].name) for span in spans if len(span.pieces) == 1)
                dense = max(
                    (one.numel() for one in alone if one is not None and not _is_dense(one)), default=0
                )
                given = self.layout, stored, [span.part for span in spans], dense, shares
                lanes.append((DeviceLane(*given, device, aside) if device else Lane(*given), spans))
        return lanes


def _spans(layout: Layout, devices: Devices) -> Plan:
    """The spans of each device, in the order of the flat vector; None is the host."""
    plan: Plan = {}
    group: list[Piece] = []
    before = None
    for at, ((spec, start, stop), device) in enumerate(zip(layout.places, devices, strict=True)):
        end = layout.places[at + 1].start if at + 1 < len(layout.places) else layout.size
        spans, most = plan.setdefault(device, []), SPAN_VALUES if device is None else LANE_VALUES
        first = group[0].place if group else start
        apart = spec.size >= LARGE_VALUES or device != before
        if group and (apart or stop - first > most or first < layout.coded <= start):
            group = []
        before = device
        if 0 < spec.size < LARGE_VALUES:
            group.append(Piece(spec.name, 0, spec.size, start, spec.buffer))
            grown = Span(Part(group[0].place, end, 0), group)
            spans[len(spans) - (len(group) > 1) :] = [grown]
            continue
        for begin in range(0, spec.size, most):
            until = min(begin + most, spec.size)
            part = Part(start + begin, end if until == spec.size else start + until, 0)
            spans.append(Span(part, [Piece(spec.name, begin, until, part.start, spec.buffer)]))
    return plan


def _alone(lane: Lane, span: Span, tensors: Mapping[str, torch.Tensor], divisor: float) -> torch.Tensor:
    """The values of a span of one piece, f32 [n], divided: where they are, or in the lane's scratch memory."""
    name, start, stop, _, buffer = span.pieces[0]
    room = lane.room[: stop - start]
    values = _flat(lane, tensors[name], fill=start == 0)[start:stop]
    values = values if _is_plain(values, room) else room.copy_(values)
    if divisor == 1 or buffer:
        return values
    # By a Python number CUDA would not divide, but multiply by its reciprocal; also below.
    return torch.div(values, room.new_full((), divisor), out=room)


def _together(lane: Lane, span: Span, tensors: Mapping[str, torch.Tensor], divisor: float) -> torch.Tensor:
    """The values of a span of several tensors, f32 [n], divided, in scratch memory; zeros between them."""
    room = lane.room[: span.part.size].zero_()
    sources = [tensors[piece.name] for piece in span.pieces]
    places = [_place(piece, span.part, room) for piece in span.pieces]
    lane.copy([place.view(one.shape) for place, one in zip(places, sources, strict=True)], sources)
    if divisor != 1:
        chosen = [place for piece, place in zip(span.pieces, places, strict=True) if not piece.buffer]
        by = room.new_full((), divisor)
        for values in [room] if len(chosen) == len(places) else chosen:
            values.div_(by)
    return room


def _flat(lane: Lane, tensor: torch.Tensor, fill: bool = False) -> torch.Tensor:
    """The values of a tensor, [n]: its own memory, or scratch memory of the lane, which `fill` makes a copy of them."""
    if _is_dense(tensor):
        return tensor.view(-1)
    dense = lane.dense[: tensor.numel()]
    if fill:
        lane.copy([dense.view(tensor.shape)], [tensor])
    return dense


def _place(piece: Piece, part: Part, room: torch.Tensor) -> torch.Tensor:
    at = piece.place - part.start
    return room[at : at + piece.stop - piece.start]


def _is_plain(flat: torch.Tensor, room: torch.Tensor) -> bool:
    """Whether codecs take these flat values as they are, where the lane's `room` is."""
    known = type(flat) is torch.Tensor and flat.device == room.device
    return known and flat.dtype == torch.float32 and not flat.is_neg()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and type(tensor) is torch.Tensor
