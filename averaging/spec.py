"""`RunSpec`: everything that the peers of a run must agree on, and its hash."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from functools import cached_property

import msgspec

from equipoise.averaging.layout import Layout
from equipoise.averaging.options import (
    MARK_BYTES,
    MAX_GROUP_SIZE,
    MAX_MARKS,
    MAX_NAME_CHARS,
    MAX_PARTS,
    MAX_TERM_CHARS,
    MAX_TERM_VALUE_CHARS,
    MAX_TERMS,
    Frozen,
    Needs,
    RunOptions,
    Terms,
)
from equipoise.averaging.rules import Mean, Rule, parse_rule
from equipoise.averaging.schema import Schema
from equipoise.averaging.strategy import Strategy, parse_strategy
from equipoise.averaging.weights import cap_of
from equipoise.compression import parse_codec

PROTOCOL_VERSION = 18
"""Version of the messages, part of every spec's hash; it grows when older peers would misread messages."""

MIN_PART_VALUES, MAX_PART_VALUES = 256, 1024 * 1024
"""Fewest and most values of a part: in fp32 they must fit into one frame's body of 4 MiB; tiny parts are for tests."""

SHORT_PARTS = 2 * MAX_GROUP_SIZE
"""Most parts of a vector that are shorter than `part_values`: the last of each member's share, in both regions."""

PLACES = "parameter groups"
"""Name of the term whose last word has a character for each tensor, or for several in a row: its place in a group."""

_PRINTABLE = re.compile(r"\A[ -~]*\Z")


class SpecError(ValueError):
    """An option of a run is not valid; the message says what was expected and what came."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The terms that the peers of a run agree on; only peers with equal hashes meet.

    Attributes:
        name: The run's name, 1 to 64 printable characters.
        schema: The tensors.
        options: The run's options of averaging.
        terms: Further values that must be alike, as ("target batch size", "4096"); they have no other effect here.
        frozen: What is told of the tensors that no peer trains, in the model's order; neither has this.
    """

    name: str
    schema: Schema
    options: RunOptions
    terms: Terms = ()
    frozen: Frozen = ()

    @classmethod
    def create(
        cls,
        name: str,
        schema: Schema,
        options: RunOptions = RunOptions(),  # noqa: B008 - frozen
        terms: Mapping[str, str] | None = None,
        frozen: Frozen = (),
    ) -> RunSpec:
        """Check all arguments and bring them into their canonical form.

        Raises:
            SpecError: An argument is out of its range.
            equipoise.compression.CodecError: The codec is unknown.
        """
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise SpecError(
                f"expected a run name of 1 to {MAX_NAME_CHARS} printable characters, got {str(name)[:80]!r}"
            )
        agreed = check_terms(terms or {})
        spec = cls(name=name, schema=schema, options=checked(options), terms=agreed, frozen=frozen)
        most = spec.options.part_values * (MAX_PARTS - SHORT_PARTS)
        if not 0 < spec.layout.size <= most:
            raise SpecError(f"expected 1 to {most} values, got {spec.layout.size}; raise part_values")
        return spec

    @cached_property
    def layout(self) -> Layout:
        """The places of the tensors in the flat vector; they follow from the hashed fields."""
        return Layout(self.schema, parse_codec(self.options.codec))

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy that `options` names."""
        return parse_strategy(self.options.strategy)

    @property
    def needs(self) -> Needs:
        """The needs of a group; peers with terms train from one state."""
        strategy, places = self.strategy, bool(self.terms)
        apart = self.norm_cap if strategy.pairs else math.inf
        return Needs(self.options.group_size, strategy.quorum, strategy.least, places, apart, strategy.total)

    @property
    def cap(self) -> float:
        """The most that a contributor counts, in lower medians of the weights; 1 in the pairs of gossip."""
        cap = cap_of(self.options.weights)
        return min(cap, 1.0) if self.strategy.pairs and cap < math.inf else cap

    @property
    def norm_cap(self) -> float:
        """The largest norm that counts, in lower medians; infinite where the rule is robust by itself."""
        return cap_of(self.options.norms, "norms") if isinstance(self.rule, Mean) else math.inf

    @cached_property
    def rule(self) -> Rule:
        """The rule that `options` names."""
        return parse_rule(self.options.rule)

    @cached_property
    def marks(self) -> bytes:
        """A short hash of each of the first `MAX_MARKS` tensors, frozen ones last, to find the first that differs."""
        encoded = map(msgspec.msgpack.encode, (*self.schema.tensors, *self.frozen)[:MAX_MARKS])
        return b"".join(hashlib.sha256(tensor).digest()[:MARK_BYTES] for tensor in encoded)

    @cached_property
    def hash(self) -> str:
        """SHA-256 in hex, 64 characters, of the spec and the protocol version."""
        content = msgspec.json.encode((PROTOCOL_VERSION, self))
        return hashlib.sha256(content).hexdigest()


def checked(options: RunOptions) -> RunOptions:
    """Options whose specs are in their canonical form.

    Raises:
        SpecError: An option is out of its range.
        equipoise.compression.CodecError: The codec is unknown.
    """
    if not isinstance(options.group_size, int) or not 2 <= options.group_size <= MAX_GROUP_SIZE:
        raise SpecError(f"expected a group size of 2 to {MAX_GROUP_SIZE}, got {options.group_size!r}")
    if not _is_short(options.base, MAX_TERM_CHARS):
        told = f"at most {MAX_TERM_CHARS} characters of printable ASCII, got {str(options.base)[:80]!r}"
        raise SpecError(f"expected as name of the base {told}")
    codec, values = parse_codec(options.codec), options.part_values
    unit = math.lcm(MIN_PART_VALUES, codec.granule)
    if not unit <= values <= MAX_PART_VALUES or values % unit:
        raise SpecError(
            f"expected part_values to be a multiple of {unit} up to {MAX_PART_VALUES}, got {values}"
        )
    try:
        cap_of(options.weights)
        cap_of(options.norms, "norms")
        strategy, rule = parse_strategy(options.strategy), parse_rule(options.rule)
    except ValueError as error:
        raise SpecError(str(error)) from None
    if codec.most_members is not None and options.group_size > codec.most_members:
        raise SpecError(
            f"expected a group size of at most {codec.most_members} with codec {codec.spec}, got {options.group_size}: "
            "its mean is all contributions, so in larger groups nf4 sends fewer bytes"
        )
    if codec.needs_feedback and rule.spec != Mean.spec:
        raise SpecError(f"expected the rule mean with codec {codec.spec}, got {rule.spec}")
    if strategy.quorum > options.group_size:
        raise SpecError(
            f"expected a quorum of at most the group size {options.group_size}, got {strategy.quorum}"
        )
    return msgspec.structs.replace(options, strategy=strategy.spec, rule=rule.spec, codec=codec.spec)


def check_terms(terms: Mapping[str, str]) -> Terms:
    """Terms in their hashed form: sorted pairs of short strings of printable ASCII.

    Raises:
        SpecError: There are too many terms, or one is too long or not printable ASCII; names it.
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
