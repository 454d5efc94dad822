"""What a client asks for, checked, as the specs by which the swarm knows it."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.averaging.schema import DTYPES, MAX_NAME_CHARS, MAX_TENSORS, Schema, TensorSpec
from equipoise.averaging.spec import RunSpec, Terms
from equipoise.peer.errors import Refused
from equipoise.peer.messages import JoinRun, TensorRow
from equipoise.peer.purposes import AVERAGE, STEP, swarm_name

MAX_DIMENSIONS = 64
"""torch itself stops at 64 dimensions."""


def run_specs(request: JoinRun) -> dict[str, RunSpec]:
    """What the client asks for as one `RunSpec` for each purpose; `step` only if there are gradients.

    Raises:
        SpecError: An option is out of its range.
        equipoise.compression.CodecError: The codec is unknown.
        Refused: A tensor's description is not valid.
    """
    rows_of = {AVERAGE: request.tensors, STEP: request.gradients}
    return {
        purpose: RunSpec.create(
            swarm_name(request.run, purpose),
            _schema(rows),
            strategy=request.strategy,
            codec=request.codec,
            group_size=request.group_size,
            part_values=request.part_values,
            weights=request.weights,
        )
        for purpose, rows in rows_of.items()
        if rows
    }


def agreed_spec(spec: RunSpec, terms: Terms, buffers: Sequence[TensorRow]) -> RunSpec:
    """The spec of a run whose peers have these terms alike, and whose buffers travel behind the tensors.

    Raises:
        SpecError: A term, or the number of values, is out of its range.
        Refused: A buffer's description is not valid.
    """
    return RunSpec.create(
        spec.name,
        _schema([*tensor_rows(spec.schema), *buffers]),
        strategy=spec.strategy,
        codec=spec.codec,
        group_size=spec.group_size,
        part_values=spec.part_values,
        weights=spec.weights,
        terms=dict(terms),
    )


def _schema(rows: Sequence[TensorRow]) -> Schema:
    if len(rows) > MAX_TENSORS or len({row.name for row in rows}) < len(rows):
        raise Refused(f"expected at most {MAX_TENSORS} tensors of different names, got {len(rows)}")
    for row in rows:
        if not 0 < len(row.name) <= MAX_NAME_CHARS or row.dtype not in DTYPES:
            raise Refused(f"tensor {row.name[:64]!r} of dtype {row.dtype[:64]!r} cannot be averaged")
        if len(row.shape) > MAX_DIMENSIONS or any(size < 0 for size in row.shape):
            raise Refused(f"tensor {row.name[:64]!r} has a shape that is none: {str(row.shape)[:64]}")
    return Schema(tuple(TensorSpec(row.name, row.shape, row.dtype, row.buffer) for row in rows))


def tensor_rows(schema: Schema) -> tuple[TensorRow, ...]:
    """A schema in the form in which a client sends it to its daemon."""
    return tuple(TensorRow(spec.name, spec.shape, spec.dtype, spec.buffer) for spec in schema.tensors)
