"""What a peer tells of its spec to one whose spec is another, and how the two differ, in one line.

A spec's hash says that something differs, not what. A description is short whatever the model: of each tensor it has
four bytes, enough to find the first that differs, and of one tensor, the one that was asked for, its name and shape.
Descriptions come from strangers, so all in them is bounded and printable, and none is believed further than a line of
text goes.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Annotated

import msgspec

from equipoise.averaging.options import Number, RunOptions, Word
from equipoise.averaging.schema import TensorSpec
from equipoise.averaging.spec import MAX_TERM_VALUE_CHARS, MAX_TERMS, PROTOCOL_VERSION, RunSpec

MARK_BYTES = 4
"""Two tensors of the same place look alike by chance once in four thousand million."""

MAX_MARKS = 8192
"""32 KiB; models with more tensors differ before that, or are said to differ behind it."""

MAX_NOTE_CHARS = 160
"""A line of a terminal, for a tensor's name and shape."""

MAX_SHOWN = 60
"""Characters of a value that a line shows: the optimizer's options are one value, and one of them differs."""

LEAD = 16
"""Characters shown before the place where two long values begin to differ."""

MAX_DIFFERENCES = 3
"""Differences that a line names; who mixed up two scripts need not read all of them."""

Value = Annotated[str, msgspec.Meta(max_length=MAX_TERM_VALUE_CHARS, pattern=r"\A[ -~]*\Z")]
Note = Annotated[str, msgspec.Meta(max_length=MAX_NOTE_CHARS, pattern=r"\A[ -~]*\Z")]


class Description(msgspec.Struct, frozen=True, array_like=True):
    """A spec in brief.

    Attributes:
        version: Protocol version.
        options: As in the spec.
        terms: As in the spec.
        values: Values of all tensors, without padding.
        tensors: How many tensors it has.
        marks: `MARK_BYTES` of each of the first `MAX_MARKS` tensors.
        index: The tensor that was asked for.
        note: Its name, dtype and shape; empty if there is none.
    """

    version: Number
    options: RunOptions
    terms: Annotated[tuple[tuple[Word, Value], ...], msgspec.Meta(max_length=MAX_TERMS)]
    values: Number
    tensors: Number
    marks: Annotated[bytes, msgspec.Meta(max_length=MARK_BYTES * MAX_MARKS)]
    index: Number
    note: Note


def describe(spec: RunSpec) -> Description:
    """Describe a spec, and the first tensor of its schema."""
    tensors = spec.schema.tensors
    return Description(
        version=PROTOCOL_VERSION,
        options=spec.options,
        terms=spec.terms,
        values=spec.schema.size,
        tensors=len(tensors),
        marks=b"".join(_mark(tensor) for tensor in tensors[:MAX_MARKS]),
        index=0,
        note=_note(tensors[0]),
    )


def regarding(description: Description, spec: RunSpec, index: int) -> Description:
    """The description of `spec`, with what there is to say of the tensor at `index`."""
    tensors = spec.schema.tensors
    note = _note(tensors[index]) if index < len(tensors) else ""
    return msgspec.structs.replace(description, index=index, note=note)


def first_difference(here: Description, there: Description) -> int | None:
    """Place of the first tensor that differs, or is there on one side only; None if none does, as far as is told."""
    pairs = itertools.zip_longest(_marks(here), _marks(there))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


def differences(here: Description, there: Description) -> str:
    """How two specs differ, one line; empty if they do not, as far as is told.

    Of the tensors the first that differs is named where the descriptions are about that one.
    """
    if there.version != here.version:
        older = "here" if here.version < there.version else "there"
        return (
            f"protocol version: here {here.version}, there {there.version}; "
            f"the equipoise {older} is older: upgrade it with pip install --upgrade equipoise"
        )
    own, others = dict(here.terms), dict(there.terms)
    found = [_model(here, there)] + [
        _differs(name, own.get(name, "nothing"), others.get(name, "nothing"))
        for name in sorted({**own, **others})
    ]
    for name in sorted(RunOptions.__struct_fields__):
        ours, theirs = (str(getattr(one.options, name)) for one in (here, there))
        found.append(_differs(name.replace("_", " "), ours, theirs))
    found = [each for each in found if each]
    more = len(found) - MAX_DIFFERENCES
    return "; ".join(found[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _model(here: Description, there: Description) -> str:
    place = first_difference(here, there)
    if place is None:
        if (here.values, here.tensors) == (there.values, there.tensors):
            return ""
        return f"model: here {_size(here)}, there {_size(there)}"
    ours, theirs = ((one.note or "missing") if one.index == place else "another" for one in (here, there))
    return f"model: tensor {place} is {ours} here, {theirs} there (here {_size(here)}, there {_size(there)})"


def _size(one: Description) -> str:
    return f"{one.values} values in {one.tensors} tensor{'' if one.tensors == 1 else 's'}"


def _marks(one: Description) -> list[bytes]:
    return [one.marks[at : at + MARK_BYTES] for at in range(0, len(one.marks), MARK_BYTES)]


def _differs(name: str, here: str, there: str) -> str:
    if here == there:
        return ""
    same = next(
        (at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there))
    )
    return f"{name}: here {_around(here, same)}, there {_around(there, same)}"


def _around(text: str, place: int) -> str:
    """A long text cut to the part around `place`."""
    if len(text) <= MAX_SHOWN:
        return text
    start = max(min(place - LEAD, len(text) - MAX_SHOWN), 0)
    before, after = "..." if start else "", "..." if start + MAX_SHOWN < len(text) else ""
    return f"{before}{text[start : start + MAX_SHOWN]}{after}"


def _mark(tensor: TensorSpec) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(tensor)).digest()[:MARK_BYTES]


def _note(tensor: TensorSpec) -> str:
    kind = " buffer" if tensor.buffer else ""
    shape = f"{tensor.dtype} {list(tensor.shape)}"[: MAX_NOTE_CHARS // 2 - len(kind)] + kind
    name = ascii(tensor.name)
    room = MAX_NOTE_CHARS - len(shape) - 1
    return f"{name if len(name) <= room else name[: room - 3] + '...'} {shape}"
