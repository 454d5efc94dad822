"""The purposes of a run: it exchanges tensors (`average`) or gradients (`step`).

A peer that averages must never meet one that steps, since the mean of parameters and gradients is garbage that nobody
would notice. So each purpose is a run of its own in the swarm, under a name of its own.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from equipoise.averaging.options import MAX_NAME_CHARS, Frozen, Terms
from equipoise.averaging.schema import Dtype, Schema
from equipoise.averaging.spec import RunSpec, SpecError
from equipoise.peer.control.messages import JoinRun

AVERAGE: Final = "average"
STEP: Final = "step"
PURPOSES = (AVERAGE, STEP)

STEP_SUFFIX = "/step"


def swarm_name(run: str, purpose: str) -> str:
    """The name under which the swarm knows a purpose of a run.

    Raises:
        SpecError: The run's name leaves no room for that, or could be taken for such a name.
    """
    longest = MAX_NAME_CHARS - len(STEP_SUFFIX)
    if not isinstance(run, str) or not 0 < len(run) <= longest or run.endswith(STEP_SUFFIX):
        raise SpecError(
            f"expected a run name of 1 to {longest} printable characters that does not end in {STEP_SUFFIX!r}, "
            f"got {str(run)[:80]!r}"
        )
    return run + STEP_SUFFIX if purpose == STEP else run


def agreed_spec(
    joined: RunSpec, terms: Terms, buffers: Schema, dtypes: tuple[Dtype, ...] = (), frozen: Frozen = ()
) -> RunSpec:
    """The spec of `step` once the script has agreed: with buffers and `frozen` tensors, and with the parameters'
    `dtypes` if it told any.

    Raises:
        ValueError: A term is not valid, a buffer has the name of a gradient, or the number of dtypes is another.
    """
    own = joined.schema.tensors
    if dtypes:
        own = tuple(replace(one, dtype=dtype) for one, dtype in zip(own, dtypes, strict=True))
    return RunSpec.create(joined.name, Schema((*own, *buffers.tensors)), joined.options, dict(terms), frozen)


def run_specs(request: JoinRun) -> dict[str, RunSpec]:
    """The spec of each purpose of a run that a client joins; of `step` only if there are gradients.

    Raises:
        SpecError: An option is out of its range.
        equipoise.compression.CodecError: The codec is unknown.
    """
    schemas = {AVERAGE: request.tensors, STEP: request.gradients}
    return {
        purpose: RunSpec.create(swarm_name(request.run, purpose), schema, request.options)
        for purpose, schema in schemas.items()
        if schema.tensors
    }
