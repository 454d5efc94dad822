"""Specs as people write them and runs agree on them: `name`, or `name:option=value,option=value`.

Codecs, strategies and rules are named so. Each option is given at most once, in any order. The canonical form spells
out every option, in the order in which it is documented; only an empty list, and an option that is off, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

Value = int | float | str | tuple[str, ...]

MAX_DIGITS = 6
"""Most digits of a whole number in a spec."""

_DIGITS = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}")
"""int() would take signs, underscores, spaces and other scripts' digits, and so give one thing many specs."""

MAX_DECIMAL_CHARS = 24
"""Most characters of a decimal number in a spec: the shortest form of a float takes up to 22."""

MIN_DECIMAL, MAX_DECIMAL = 1e-30, 1e30
"""Least and greatest decimal number in a spec, except for 0: in float32 both are finite, and not subnormal."""

_DECIMAL = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]{1,2})?")

MAX_WORDS = 8
"""Most words of a list in a spec."""

MAX_WORD_CHARS = 24
"""Most characters of a word of a list in a spec."""

_WORD = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_WORD_CHARS}}}")


class Option(NamedTuple):
    """One option of a spec.

    Attributes:
        default: Its value where the spec does not give it.
        expected: What a value is, for people who gave another.
        read: Returns the value that a text means; None if it means none.
        known: All texts that it reads, where they are few; errors name the nearest.
    """

    default: Value
    expected: str
    read: Callable[[str], Value | None]
    known: tuple[str, ...] = ()


def whole(default: int) -> Option:
    """An option that is a whole number."""
    read = _DIGITS.fullmatch
    return Option(
        default, f"a whole number such as {default}", lambda text: int(text) if read(text) else None
    )


def decimal(default: float) -> Option:
    """An option that is a decimal number, at least 0: "0.2", ".2" and "2e-1" are one number."""
    return Option(default, f"a decimal number such as {_written(default)}", _decimal)


def seconds_or(word: str, default: float) -> Option:
    """An option that is a decimal number, as with `decimal`, or a word."""
    number = decimal(default)
    return Option(
        default, f"{number.expected}, or {word}", lambda text: text if text == word else number.read(text)
    )


def words() -> Option:
    """An option that is a list of different words, as "gpu+fast"; their order means nothing, and they are sorted."""
    letters = f"1 to {MAX_WORD_CHARS} characters of A-Z, a-z, 0-9, _, . and -"
    expected = f"1 to {MAX_WORDS} different words joined by +, each of {letters}"
    return Option((), expected, _words)


def choice(*words: str) -> Option:
    """An option that is one of these words; the first is the default."""
    return Option(words[0], f"one of {', '.join(words)}", lambda text: text if text in words else None, words)


def off(option: Option) -> Option:
    """The same option, which is off unless it is given: then it is (), and not in the canonical spec."""
    return option._replace(default=())


def canonical(name: str, options: Mapping[str, Value]) -> str:
    """Return the canonical spec of something with these options, which are in the documented order."""
    given = ",".join(f"{option}={_written(value)}" for option, value in options.items() if value != ())
    return f"{name}:{given}" if given else name


def _decimal(text: str) -> float | None:
    if len(text) > MAX_DECIMAL_CHARS or not _DECIMAL.fullmatch(text):
        return None
    value = float(text)
    return value if value == 0 or MIN_DECIMAL <= value <= MAX_DECIMAL else None


def _words(text: str) -> tuple[str, ...] | None:
    given = text.split("+", MAX_WORDS)
    fits = len(set(given)) == len(given) <= MAX_WORDS and all(map(_WORD.fullmatch, given))
    return tuple(sorted(given)) if fits else None


def _written(value: Value) -> str:
    """The one form of a value: of a float the shortest that reads as it, of a whole one without a fraction."""
    if isinstance(value, tuple):
        return "+".join(value)
    if not isinstance(value, float):
        return str(value)
    digits, _, exponent = repr(value).removesuffix(".0").partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits
