"""Copies and fingerprints of a machine's state, taken from outside, so that the explorer can branch on it.

Both walk whatever attributes there are. What is immutable is shared; what only people read is left out of fingerprints.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from equipoise.averaging.allreduce.events import Fail

UNREAD = frozenset({"notes", "group", "values"})
"""Attributes that no machine decides by: what it says to people and drivers, what is the same in all of a search."""

_ATOMS = frozenset({int, str, bytes, float, bool, type(None), tuple, frozenset})
_frozen: dict[type, bool] = {}


def clone(value: Any) -> Any:
    """A copy that shares only what is immutable."""
    kind = type(value)
    if kind in _ATOMS or _is_frozen(kind):
        return value
    if isinstance(value, dict):
        copy = kind()
        for key, item in value.items():
            copy[key] = clone(item)
        return copy
    if kind is list:
        return [clone(item) for item in value]
    if kind is set:
        return set(value)
    copy = object.__new__(kind)
    for name, item in _attributes(value):
        setattr(copy, name, clone(item))
    return copy


def fingerprint(value: Any) -> Hashable:
    """Equal for states in which the machine does the same from now on."""
    kind = type(value)
    if kind is Fail:
        return Fail  # why is for people
    if kind in _ATOMS or _is_frozen(kind):
        return value  # type: ignore[no-any-return]
    if isinstance(value, dict):
        return frozenset((key, fingerprint(item)) for key, item in value.items())
    if kind is list:
        return tuple(fingerprint(item) for item in value)
    if kind is set:
        return frozenset(value)
    return tuple(fingerprint(item) for name, item in _attributes(value) if name not in UNREAD)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return list(vars(value).items())


def _is_frozen(kind: type) -> bool:
    known = _frozen.get(kind)
    if known is None:
        known = (is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)) or (  # type: ignore[attr-defined]
            issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen
        )
        _frozen[kind] = known
    return known
