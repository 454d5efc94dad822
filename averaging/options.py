"""`RunOptions`: a user's choices for a run. Clients send them, so this imports no torch."""

from __future__ import annotations

from typing import Annotated

import msgspec

from equipoise.averaging.weights import CAPPED

MAX_TERM_CHARS = 64

MAX_SPEC_CHARS = 256
"""Longest spec of a strategy or a rule, which may have lists among its options."""

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
        weights: The limit of a contributor's weight: `capped:10`, at most 10 times the group's median, or `any`.
    """

    strategy: Spec = "allreduce"
    rule: Spec = "mean"
    codec: Word = "int8"
    group_size: Number = 16
    part_values: Number = 1024 * 1024
    weights: Word = CAPPED
