"""`RunOptions`: a user's choices for a run, and limits of runs. Clients send them, so this imports no torch."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import msgspec

from equipoise.averaging.weights import CAPPED

MAX_GROUP_SIZE = 64
"""Most members of a group: the cost of a round grows with their square, and the manifest must fit into one header."""

MAX_PARTS = 65_536
"""Most parts of a vector: it bounds the bitmaps of parts in messages (8 KiB)."""

MAX_NAME_CHARS = 64

MAX_TERM_CHARS = 64

MAX_TERMS = 32
"""Most terms: an optimizer with its schedule takes about ten; peers whose terms differ get all of them."""

MAX_TERM_VALUE_CHARS = 256
"""Longest value of a term: an optimizer with all its options takes 200 characters."""

MARK_BYTES = 4
"""Length of a tensor's mark. Two different tensors have the same mark by chance once in four thousand million."""

MAX_MARKS = 8192
"""Most tensors with a mark, 32 KiB in all; a difference behind them is reported without a tensor's name."""

MAX_PARKED_GROUPS = 4
"""Most parked joins, in group sizes: views of the run differ by a group or two, never by this many."""

TOPOLOGIES = ("random", "exponential", "ring")
"""Words for the peers among which a peer of gossip draws its partners; see `gossip.machine.partners`."""

MAX_SPEC_CHARS = 256
"""Longest spec of a strategy or a rule, which may have lists among its options."""

MAX_FROZEN_CHARS = 640
"""Longest line about a frozen tensor: its name has at most 512 characters."""

MAX_FROZEN = 100_000
"""Most lines about frozen tensors, as many as a schema has tensors."""

Frozen = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MAX_FROZEN_CHARS)], ...], msgspec.Meta(max_length=MAX_FROZEN)
]
"""A line for each tensor that no peer trains: its name, dtype, shape, and a digest of its values."""

Terms = tuple[tuple[str, str], ...]
"""Pairs of the name and the value of an agreed term, sorted."""

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Word = Annotated[str, msgspec.Meta(max_length=MAX_TERM_CHARS, pattern=r"\A[ -~]*\Z")]

Spec = Annotated[str, msgspec.Meta(max_length=MAX_SPEC_CHARS, pattern=r"\A[ -~]*\Z")]


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A user's options of a run. The types bound the values from other processes; `spec.checked` validates them.

    Attributes:
        strategy: The form of the groups: a strategy spec in canonical form, as `allreduce:quorum=2`.
        rule: The rule that makes one vector of the contributions: a rule spec in canonical form, as `mean`.
        codec: Codec spec in canonical form, as `int8:block=128`.
        group_size: Most peers that average together in one round, 2 to 64.
        part_values: Values per part of a share (1 Mi measured best), a multiple of 256 and of the codec's block.
        norms: The limit of a contribution's 2-norm: `capped:10`, at most 10 times the lower median, or `any`.
        weights: The limit of a contributor's weight: `capped:10`, at most 10 times the group's lower median, or `any`.
        base: The user's name for the tensors that no peer trains; empty where those are compared.
    """

    strategy: Spec = "allreduce"
    rule: Spec = "mean"
    codec: Word = "int8"
    group_size: Number = 16
    part_values: Number = 1024 * 1024
    weights: Word = CAPPED
    norms: Word = CAPPED
    base: Word = ""


class Needs(NamedTuple):
    """The needs of a group of a run.

    Attributes:
        group_size: Most members.
        quorum: Fewest contributors.
        least: Least weight of a contributor.
        places: Whether all peers hold one state, so that each round has one group, of the peers that have its places.
        apart: The largest ratio of the norms of two contributors. Of a pair no median shows which of them lies.
        total: Sum of the weights of a group; 0 for any.
    """

    group_size: int
    quorum: int = 2
    least: float = 0.0
    places: bool = False
    apart: float = math.inf
    total: float = 0.0
