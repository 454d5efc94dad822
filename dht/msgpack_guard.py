"""A bound on msgpack from strangers, checked before anything decodes it.

Decoders recurse and allocate by what the input announces: 100 bytes can announce 2**32 elements. This walks the
bytes once without either (msgpack specification, github.com/msgpack/msgpack/blob/master/spec.md).
"""

from __future__ import annotations

MAX_DEPTH = 8
"""Our records nest 2 deep; later fields of later versions may nest a little more."""
MAX_BYTES = 64 * 1024
"""The largest value on the wire is a page of records of one key."""

_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
}
"""Type byte -> payload bytes: nil, booleans, floats, integers."""
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Type byte -> bytes of its length: binaries and strings."""
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Type byte -> (bytes of its count, values per count): arrays and maps."""


class Unsafe(ValueError):
    """The bytes are too long, too deep, torn, or use extension types."""


def check(data: bytes, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> None:
    """Check that `data` is one msgpack value within bounds.

    Raises:
        Unsafe: It is not; says why.
    """
    if len(data) > max_bytes:
        raise Unsafe(f"expected at most {max_bytes} bytes, got {len(data)}")
    position = 0
    open_counts = [1]
    while open_counts:
        if open_counts[-1] == 0:
            open_counts.pop()
            continue
        open_counts[-1] -= 1
        position, children = _step(data, position)
        if children > len(data) - position:
            raise Unsafe(f"announces {children} values in {len(data) - position} bytes")
        if children:
            open_counts.append(children)
        if len(open_counts) - 1 > max_depth:
            raise Unsafe(f"expected at most {max_depth} levels of nesting")
    if position != len(data):
        raise Unsafe(f"{len(data) - position} bytes follow the value")


def _step(data: bytes, position: int) -> tuple[int, int]:
    """Return where the value's payload ends and how many values it contains."""
    kind, position = _number(data, position, 1)
    if kind <= 0x7F or kind >= 0xE0:
        return position, 0
    if kind <= 0x8F:
        return position, 2 * (kind & 0x0F)
    if kind <= 0x9F:
        return position, kind & 0x0F
    if kind <= 0xBF:
        return _skip(data, position, kind & 0x1F), 0
    if kind in _FIXED:
        return _skip(data, position, _FIXED[kind]), 0
    if kind in _SIZED:
        size, position = _number(data, position, _SIZED[kind])
        return _skip(data, position, size), 0
    if kind in _COUNTED:
        width, per_count = _COUNTED[kind]
        count, position = _number(data, position, width)
        return position, count * per_count
    raise Unsafe(f"type byte 0x{kind:02x} is not taken here")


def _number(data: bytes, position: int, width: int) -> tuple[int, int]:
    end = _skip(data, position, width)
    return int.from_bytes(data[position:end], "big"), end


def _skip(data: bytes, position: int, size: int) -> int:
    if size > len(data) - position:
        raise Unsafe("the value is cut off")
    return position + size
