"""Codec specs: `name`, or `name:option=value,option=value`, as users write and runs agree on them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping

from equipoise.compression.codec import Codec
from equipoise.compression.errors import CodecError
from equipoise.compression.floats import FloatCodec
from equipoise.compression.int8 import DEFAULT_BLOCK, Int8Codec

MAX_SPEC_CHARS = 64
"""Thrice the longest spec there is; what is longer came from nobody who means well, and is not repeated in errors."""

_DIGITS = re.compile(r"[0-9]{1,6}")
"""int() would take signs, underscores, spaces and other scripts' digits, and so give one codec many specs."""


def parse_codec(spec: str) -> Codec:
    """Return the codec that `spec` names, such as "fp32", "fp16", "bf16", "int8" or "int8:block=256".

    Raises:
        CodecError: No such codec, option or value; names what came, what is known, and the nearest known name.
    """
    if not isinstance(spec, str):
        raise CodecError(f"a codec spec is a string such as 'int8:block=256', not {type(spec).__name__}")
    if len(spec) > MAX_SPEC_CHARS:
        raise CodecError(f"a codec spec has at most {MAX_SPEC_CHARS} characters, not {len(spec)}")
    name, colon, rest = spec.partition(":")
    if name not in _CODECS:
        raise CodecError(f"unknown codec {name!r}; {_known(name, _CODECS, 'codecs')}")
    known, make = _CODECS[name]
    options = _options(name, rest, known) if colon else {}
    return make(options)


def _options(name: str, text: str, known: tuple[str, ...]) -> dict[str, int]:
    options: dict[str, int] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        if not known:
            raise CodecError(f"{name} takes no options, not {item!r}; write {name!r}")
        if key not in known:
            raise CodecError(f"{name} has no option {key!r}; {_known(key, known, 'options')}")
        if key in options:
            raise CodecError(f"{name}: option {key!r} is given twice")
        if not _DIGITS.fullmatch(value):
            raise CodecError(f"{name}: {key} is a whole number such as {DEFAULT_BLOCK}, not {value!r}")
        options[key] = int(value)
    return options


def _known(name: str, known: Mapping[str, object] | tuple[str, ...], what: str) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{what} are {', '.join(known)}{hint}"


_CODECS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, int]], Codec]]] = {
    "fp32": ((), lambda _: FloatCodec("fp32")),
    "fp16": ((), lambda _: FloatCodec("fp16")),
    "bf16": ((), lambda _: FloatCodec("bf16")),
    "int8": (("block",), lambda options: Int8Codec(options.get("block", DEFAULT_BLOCK))),
}
"""Options that each codec takes, and how it is made of them."""
