"""Specs as people write them and runs agree on them: `name`, or `name:option=value,option=value`.

Codecs, strategies and rules are named so. Each option is given at most once, in any order. The canonical form spells
out every option, in the order in which it is documented; only an empty list is left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from equipoise.compression.plugins import Plugins

Value = int | float | str | tuple[str, ...]
T = TypeVar("T")

MAX_DIGITS = 6
"""Most digits of a whole number in a spec."""

_DIGITS = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}")
"""int() would take signs, underscores, spaces and other scripts' digits, and so give one thing many specs."""

MAX_DECIMAL_CHARS = 24
"""Most characters of a decimal number in a spec: the shortest form of a float takes up to 22."""

MIN_DECIMAL, MAX_DECIMAL = 1e-30, 1e30
"""Least and greatest decimal number in a spec, except for 0: in float32 both are finite, and not subnormal."""

_DECIMAL = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]{1,2})?")

SHOWN_CHARS = 32
"""Most characters of a spec that is too long that its error repeats."""

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


def words() -> Option:
    """An option that is a list of different words, as "gpu+fast"; their order means nothing, and they are sorted."""
    letters = f"1 to {MAX_WORD_CHARS} characters of A-Z, a-z, 0-9, _, . and -"
    expected = f"1 to {MAX_WORDS} different words joined by +, each of {letters}"
    return Option((), expected, _words)


def choice(*words: str) -> Option:
    """An option that is one of these words; the first is the default."""
    return Option(words[0], f"one of {', '.join(words)}", lambda text: text if text in words else None, words)


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


class Registry(Generic[T]):
    """Everything of one kind, by name.

    Args:
        kind: What it is called: "codec".
        kinds: More of them: "codecs".
        example: A spec, for people who gave no string.
        most: Characters of the longest spec; what is longer is not repeated in errors.
        plugins: Finds what installed packages add, for names that are not registered.
    """

    def __init__(
        self, kind: str, kinds: str, example: str, most: int = 64, plugins: Plugins[T] | None = None
    ) -> None:
        self._kind, self._kinds = kind, kinds
        self._example = example
        self._most = most
        self._plugins = plugins
        self._known: dict[str, tuple[Callable[..., T], Mapping[str, Option]]] = {}

    def register(self, name: str, make: Callable[..., T], **options: Option) -> None:
        """Make one more known: specs of `name` are what `make` returns, which is called with all options by name."""
        self._known[name] = make, options

    def parse(self, spec: str) -> T:
        """Return what `spec` names.

        Raises:
            ValueError: Nothing of that name, no such option or value; one line that names what came, what is known,
                and the nearest known name.
        """
        if not isinstance(spec, str):
            came = type(spec).__name__
            told = f"a {self._kind} spec is a string such as {self._example!r}, not {came}"
            raise ValueError(f"{told}; {self._nearest('')}")
        name, colon, text = spec.partition(":")
        if len(spec) > self._most:
            told = f"a {self._kind} spec has at most {self._most} characters, not {len(spec)}"
            raise ValueError(f"{told}: {spec[:SHOWN_CHARS]!r}...; {self._nearest(name[:SHOWN_CHARS])}")
        found = self._known.get(name) or (self._plugins.find(name) if self._plugins else None)
        if found is None:
            raise ValueError(f"unknown {self._kind} {name!r}; {self._nearest(name)}")
        make, known = found
        given = _given(name, text, known) if colon else {}
        made = make(**{option: given.get(option, takes.default) for option, takes in known.items()})
        if len(getattr(made, "spec", "")) > self._most:
            raise ValueError(f"{name}: its whole {self._kind} spec is longer than {self._most} characters")
        return made

    def _nearest(self, came: str) -> str:
        names = [*self._known, *(self._plugins.names() if self._plugins else ())]
        return f"{self._kinds} are {', '.join(names)}{_hint(came, names)}"


def _given(name: str, text: str, known: Mapping[str, Option]) -> dict[str, Value]:
    given: dict[str, Value] = {}
    for item in text.split(","):
        option, _, came = item.partition("=")
        if not known:
            raise ValueError(f"{name} takes no options, not {item!r}; write {name!r}")
        if option not in known:
            options = f"options are {', '.join(known)}{_hint(option, known)}"
            raise ValueError(f"{name} has no option {option!r}; {options}")
        if option in given:
            raise ValueError(f"{name}: option {option!r} is given twice")
        value = known[option].read(came)
        if value is None:
            takes = known[option]
            told = f"{name}: {option} is {takes.expected}, not {came!r}"
            raise ValueError(told + _hint(came, takes.known))
        given[option] = value
    return given


def _hint(came: str, known: Iterable[str]) -> str:
    """Name the nearest known name to what came, or to its first word, as in "gossip(ring)"."""
    names, lower = list(known), came.strip().lower()
    tries = (difflib.get_close_matches(one, names, n=1) for one in (lower, re.split(r"\W", lower)[0]))
    near = next(filter(None, tries), None)
    return f" (did you mean {near[0]!r}?)" if near else ""
