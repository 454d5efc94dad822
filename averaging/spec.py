"""`RunSpec`: everything that the peers of a run must agree on, and its hash."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from functools import cached_property

import msgspec

from equipoise.averaging.layout import Layout
from equipoise.averaging.schema import Schema
from equipoise.averaging.weights import CAPPED, cap_of
from equipoise.compression import parse_codec

PROTOCOL_VERSION = 6
"""Raised when messages change in a way that older peers would misread; part of every spec's hash."""

STRATEGIES = ("allreduce",)

MAX_GROUP_SIZE = 64
"""A member exchanges with every other, so cost grows with the square; the manifest must fit one header."""

MIN_PART_VALUES, MAX_PART_VALUES = 256, 1024 * 1024
"""A part of fp32 must fit one frame's body of 4 MiB; tiny parts are for tests."""

MAX_PARTS = 65_536
"""Bounds the bitmaps of parts that messages carry (8 KiB)."""

SHORT_PARTS = 2 * MAX_GROUP_SIZE
"""Most parts of a vector that are shorter than `part_values`: the last of each member's share, in both regions."""

MAX_NAME_CHARS = 64

MAX_TERMS = 32
"""An optimizer with its schedule takes about ten; all of them are shown to peers whose terms differ."""

MAX_TERM_CHARS = 64
MAX_TERM_VALUE_CHARS = 256
"""An optimizer with all its options takes 200; more than that nobody compares by eye."""

Terms = tuple[tuple[str, str], ...]
"""Pairs of what was agreed on and what it is, sorted."""


_PRINTABLE = re.compile(r"\A[ -~]*\Z")


class SpecError(ValueError):
    """An option of a run is not valid; the message says what was expected and what came."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the peers of a run agree on; only peers with equal hashes meet.

    Attributes:
        name: The run's name, 1 to 64 printable characters.
        schema: The tensors.
        strategy: How the run averages; one of `STRATEGIES`.
        codec: Codec spec in canonical form, as `int8:block=128`.
        group_size: Most peers that average together in one round, 2 to 64.
        part_values: Values per part of a share (512 Ki measured best), a multiple of 256 and of the codec's block.
        weights: What counts of a contributor's weight: `capped:10`, at most 10 times the group's median, or `any`.
        terms: What else the peers must have alike, as ("target batch size", "4096"); nothing here acts on it.
    """

    name: str
    schema: Schema
    strategy: str = "allreduce"
    codec: str = "int8"
    group_size: int = 16
    part_values: int = 512 * 1024
    weights: str = CAPPED
    terms: Terms = ()

    @classmethod
    def create(
        cls,
        name: str,
        schema: Schema,
        *,
        strategy: str = "allreduce",
        codec: str = "int8",
        group_size: int = 16,
        part_values: int = 512 * 1024,
        weights: str = CAPPED,
        terms: Mapping[str, str] | None = None,
    ) -> RunSpec:
        """Check every option and bring the codec into its canonical form.

        Raises:
            SpecError: An option is out of its range.
            equipoise.compression.CodecError: The codec is unknown.
        """
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise SpecError(
                f"expected a run name of 1 to {MAX_NAME_CHARS} printable characters, got {str(name)[:80]!r}"
            )
        if strategy not in STRATEGIES:
            raise SpecError(f"unknown strategy {strategy!r}: expected one of {', '.join(STRATEGIES)}")
        if not isinstance(group_size, int) or not 2 <= group_size <= MAX_GROUP_SIZE:
            raise SpecError(f"expected a group size of 2 to {MAX_GROUP_SIZE}, got {group_size!r}")
        parsed = parse_codec(codec)
        unit = math.lcm(MIN_PART_VALUES, parsed.granule)
        if not unit <= part_values <= MAX_PART_VALUES or part_values % unit:
            raise SpecError(
                f"expected part_values to be a multiple of {unit} up to {MAX_PART_VALUES}, got {part_values}"
            )
        try:
            cap_of(weights)
        except ValueError as error:
            raise SpecError(str(error)) from None
        spec = cls(
            name=name,
            schema=schema,
            strategy=strategy,
            codec=parsed.spec,
            group_size=group_size,
            part_values=part_values,
            weights=weights,
            terms=check_terms(terms or {}),
        )
        most = part_values * (MAX_PARTS - SHORT_PARTS)
        if not 0 < spec.layout.size <= most:
            raise SpecError(f"expected 1 to {most} values, got {spec.layout.size}; raise part_values")
        return spec

    @cached_property
    def layout(self) -> Layout:
        """Where the tensors lie in the flat vector; follows from what is hashed."""
        return Layout(self.schema, parse_codec(self.codec))

    @property
    def hash(self) -> str:
        """SHA-256 in hex, 64 characters, of the spec and the protocol version."""
        content = msgspec.json.encode((PROTOCOL_VERSION, self))
        return hashlib.sha256(content).hexdigest()


def check_terms(terms: Mapping[str, str]) -> Terms:
    """Terms in the form that is hashed: sorted pairs of short strings of printable ASCII.

    Raises:
        SpecError: There are too many, or one is too long or is not printable ASCII; names it.
    """
    if len(terms) > MAX_TERMS:
        raise SpecError(f"expected at most {MAX_TERMS} terms, got {len(terms)}")
    for term, value in terms.items():
        if not _is_short(term, MAX_TERM_CHARS) or not term:
            raise SpecError(
                f"expected a term of 1 to {MAX_TERM_CHARS} characters of printable ASCII, got {str(term)[:80]!r}"
            )
        if not _is_short(value, MAX_TERM_VALUE_CHARS):
            raise SpecError(
                f"term {term!r}: expected at most {MAX_TERM_VALUE_CHARS} characters of printable ASCII, "
                f"got {str(value)[:80]!r}"
            )
    return tuple(sorted(terms.items()))


def _is_short(text: object, limit: int) -> bool:
    return isinstance(text, str) and len(text) <= limit and bool(_PRINTABLE.match(text))
