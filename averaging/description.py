"""What a peer tells of its spec to one whose spec is another, and how the two differ, in one line.

A spec's hash says that something differs, not what. A peer that asks sends four bytes of each of its tensors; the peer
that answers finds the first tensor that differs, and tells its name and shape beside all options and terms.
Descriptions come from strangers, so all in them is bounded and printable, and none is believed further than a line of
text goes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from equipoise.averaging.options import Number, RunOptions, Word
from equipoise.averaging.spec import (
    MARK_BYTES,
    MAX_MARKS,
    MAX_TERM_VALUE_CHARS,
    MAX_TERMS,
    PROTOCOL_VERSION,
    RunSpec,
)

MAX_NOTE_CHARS = 160
"""Longest description of a tensor, its name and shape: a line of a terminal."""

MAX_SHOWN = 60
"""Most characters of a value that a line shows: the optimizer's options are one value, and one of them differs."""

LEAD = 16
"""Characters shown before the place where two long values begin to differ."""

MAX_DIFFERENCES = 3
"""Most differences that a line names; a user who mixed up two scripts need not read all of them."""

Value = Annotated[str, msgspec.Meta(max_length=MAX_TERM_VALUE_CHARS, pattern=r"\A[ -~]*\Z")]
Note = Annotated[str, msgspec.Meta(max_length=MAX_NOTE_CHARS, pattern=r"\A[ -~]*\Z")]
Marks = Annotated[bytes, msgspec.Meta(max_length=MARK_BYTES * MAX_MARKS)]


class Description(msgspec.Struct, frozen=True, array_like=True):
    """A spec in brief.

    Attributes:
        version: Protocol version.
        options: As in the spec.
        terms: As in the spec.
        values: Values of all tensors, without padding.
        tensors: How many tensors it has.
        place: Place of the first tensor that differs; None if none does, as far as there are marks.
        note: Name, dtype and shape of the tensor at that place; empty if the run has no tensor there.
    """

    version: Number
    options: RunOptions
    terms: Annotated[tuple[tuple[Word, Value], ...], msgspec.Meta(max_length=MAX_TERMS)]
    values: Number
    tensors: Number
    place: Number | None
    note: Note


def describe(spec: RunSpec, others: bytes) -> Description:
    """Describe a spec to a peer whose tensors have these marks."""
    own, schema = spec.marks, spec.schema
    starts = range(0, max(len(own), len(others)), MARK_BYTES)
    differ = (at for at in starts if own[at : at + MARK_BYTES] != others[at : at + MARK_BYTES])
    place = next((at // MARK_BYTES for at in differ), None)
    note = _note(spec, place)
    return Description(
        PROTOCOL_VERSION, spec.options, spec.terms, schema.size, len(schema.tensors), place, note
    )


def differences(here: RunSpec, there: Description) -> str:
    """How two specs differ, one line; empty if they do not, as far as is told."""
    if there.version != PROTOCOL_VERSION:
        older = "here" if there.version > PROTOCOL_VERSION else "there"
        return (
            f"protocol version: here {PROTOCOL_VERSION}, there {there.version}; "
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


def _model(here: RunSpec, there: Description) -> str:
    ours = _size(here.schema.size, len(here.schema.tensors))
    theirs = _size(there.values, there.tensors)
    if there.place is None:
        return "" if ours == theirs else f"model: here {ours}, there {theirs}"
    tensors = f"{_note(here, there.place) or 'missing'} here, {there.note or 'missing'} there"
    return f"model: tensor {there.place} is {tensors} (here {ours}, there {theirs})"


def _size(values: int, tensors: int) -> str:
    return f"{values} values in {tensors} tensor{'' if tensors == 1 else 's'}"


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


def _note(spec: RunSpec, place: int | None) -> str:
    if place is None or place >= len(spec.schema.tensors):
        return ""
    tensor = spec.schema.tensors[place]
    kind = " buffer" if tensor.buffer else ""
    shape = f"{tensor.dtype} {list(tensor.shape)}"[: MAX_NOTE_CHARS // 2 - len(kind)] + kind
    name = ascii(tensor.name)
    room = MAX_NOTE_CHARS - len(shape) - 1
    return f"{name if len(name) <= room else name[: room - 3] + '...'} {shape}"
