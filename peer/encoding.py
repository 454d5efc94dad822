"""Tensors to the encoded vector that a script shares with its daemon, and back.

A large tensor is encoded from its own memory and decoded into it, piece by piece. Small tensors pass through scratch
memory, many at a time, as do tensors that no codec takes as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from equipoise.averaging.encoded_vector import EncodedVector
from equipoise.averaging.layout import Layout
from equipoise.averaging.partition import Part
from equipoise.averaging.schema import SchemaError
from equipoise.compression import NonFiniteError

SPAN_VALUES = 512 * 1024
"""Most values that are encoded together: few enough to stay in the cache with their codes."""

LARGE_VALUES = 64 * 1024
"""Fewest values of a tensor that is encoded by itself: the fixed cost of a call is small beside them."""


class Piece(NamedTuple):
    """The values `start` to `stop` of a tensor, of which the first lies at `place` of the flat vector."""

    name: str
    start: int
    stop: int
    place: int


class Span(NamedTuple):
    """What is encoded together: a piece of a large tensor, or several small tensors.

    Attributes:
        part: Where it lies in the flat vector.
        end: Where the next span begins; values behind the part are padding.
        pieces: In the order of their places.
    """

    part: Part
    end: int
    pieces: list[Piece]


class Encoder:
    """Encodes the tensors of one `layout`, and decodes them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._spans = _spans(layout)
        self._most = max((span.part.size for span in self._spans), default=0)

    def encode(
        self,
        tensors: Mapping[str, torch.Tensor],
        out: memoryview,
        divisor: float = 1.0,
        divided: Collection[str] = (),
    ) -> int:
        """Encode checked tensors, converted to fp32; returns how many values were clamped.

        Args:
            tensors: By name, all of the schema.
            out: The encoded vector, u8 [`stored_size`].
            divisor: What the values of some tensors are divided by.
            divided: The names of those.

        Raises:
            SchemaError: A tensor holds NaN or Inf (also one that overflows fp32); `out` is then undefined.
        """
        vector, (scratch, payloads), clamped = EncodedVector(self.layout, out), self._scratch(), 0
        name, flat = "", scratch
        for part, end, pieces in self._spans:
            values = room = scratch[: part.size]
            if len(pieces) > 1:
                room.zero_()
            for piece in pieces:
                if piece.name != name:  # One copy of a strided tensor serves all its pieces.
                    name, flat = piece.name, tensors[piece.name].detach().reshape(-1)
                place = _place(piece, part, room)
                taken = _taken(flat[piece.start : piece.stop], divisor if name in divided else 1.0, place)
                if len(pieces) == 1:
                    values = taken
                elif taken is not place:
                    place.copy_(taken)
            codec = self.layout.codec_of(part)
            payload = payloads[: codec.encoded_size(part.size)]
            try:
                clamped += codec.encode(values, payload).clamped
            except NonFiniteError as error:
                raise self._named(part.start + error.index, error.value) from None
            vector.write(part, payload)
            vector.clear(part.stop, end)
        return clamped

    def decode(self, stored: memoryview, tensors: Mapping[str, torch.Tensor]) -> None:
        """Decode an encoded vector, u8 [`stored_size`], into checked tensors in place: all, or some of them.

        Raises:
            CodecError: No encoder writes such a vector; the tensors are then undefined.
        """
        vector, (scratch, payloads) = EncodedVector(self.layout, stored), self._scratch()
        with torch.no_grad():
            strided = {name: tensor for name, tensor in tensors.items() if not _is_dense(tensor)}
            dense = {
                name: torch.empty(one.shape, dtype=torch.float32, device=one.device)
                for name, one in strided.items()
            }
            flats = {name: tensor.detach().view(-1) for name, tensor in {**tensors, **dense}.items()}
            for part, _, pieces in self._spans:
                wanted = [piece for piece in pieces if piece.name in flats]
                if not wanted:
                    continue
                codec = self.layout.codec_of(part)
                payload = payloads[: codec.encoded_size(part.size)]
                vector.read(part, payload)
                targets = [flats[piece.name][piece.start : piece.stop] for piece in wanted]
                if len(pieces) == 1 and _is_plain(targets[0]):
                    # What autograd has saved counts as changed: compiled kernels do not say so.
                    targets[0][:0].zero_()
                    codec.decode(payload, targets[0])
                    continue
                room = scratch[: part.size]
                codec.decode(payload, room)
                for piece, target in zip(wanted, targets, strict=True):
                    target.copy_(_place(piece, part, room))
            for name, tensor in strided.items():
                tensor.copy_(dense[name])

    def _scratch(self) -> tuple[torch.Tensor, memoryview]:
        """Memory for the values of a span, f32, and for their payload."""
        sizes = (self.layout.codec_of(span.part).encoded_size(span.part.size) for span in self._spans)
        values = torch.from_numpy(np.empty(self._most, np.float32))
        return values, np.empty(max(sizes, default=0), np.uint8).data

    def _named(self, index: int, value: float) -> SchemaError:
        name, at = self.layout.locate(index)
        return SchemaError(
            f"tensor {name!r} holds {value} at flat index {at}: expected finite values within fp32's range"
        )


def _spans(layout: Layout) -> list[Span]:
    spans: list[Span] = []
    group: list[Piece] = []
    for at, (spec, start, stop) in enumerate(layout.places):
        end = layout.places[at + 1].start if at + 1 < len(layout.places) else layout.size
        first = group[0].place if group else start
        if group and (
            spec.size >= LARGE_VALUES or stop - first > SPAN_VALUES or first < layout.coded <= start
        ):
            group = []
        if 0 < spec.size < LARGE_VALUES:
            group.append(Piece(spec.name, 0, spec.size, start))
            grown = Span(Part(group[0].place, stop, 0), end, group)
            spans[len(spans) - (len(group) > 1) :] = [grown]
            continue
        for begin in range(0, spec.size, SPAN_VALUES):
            until = min(begin + SPAN_VALUES, spec.size)
            part = Part(start + begin, start + until, 0)
            piece = Piece(spec.name, begin, until, part.start)
            spans.append(Span(part, end if until == spec.size else part.stop, [piece]))
    return spans


def _place(piece: Piece, part: Part, room: torch.Tensor) -> torch.Tensor:
    at = piece.place - part.start
    return room[at : at + piece.stop - piece.start]


def _taken(given: torch.Tensor, divisor: float, room: torch.Tensor) -> torch.Tensor:
    """The values, divided, as a codec takes them: where they are, or in `room`."""
    if not _is_plain(given):
        given = room.copy_(given)
    if divisor == 1:
        return given
    return torch.div(given, divisor, out=room if given.is_cpu else None)


def _is_plain(flat: torch.Tensor) -> bool:
    """Whether codecs take these flat values as they are."""
    known = type(flat) is torch.Tensor and flat.device.type in ("cpu", "cuda")
    return known and flat.dtype == torch.float32 and not flat.is_neg()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and type(tensor.detach()) is torch.Tensor
