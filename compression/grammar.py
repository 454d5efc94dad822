"""Specs as people write them and runs agree on them: `name`, or `name:option=value,option=value`.

Codecs, strategies and rules are named so. Each option is given at most once, in any order. The canonical form spells
out every option, in the order in which it is documented.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

Value = int | str
T = TypeVar("T")

MAX_DIGITS = 6
"""Most digits of a whole number in a spec."""

_DIGITS = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}")
"""int() would take signs, underscores, spaces and other scripts' digits, and so give one thing many specs."""


class Option(NamedTuple):
    """One option of a spec.

    Attributes:
        default: Its value where the spec does not give it.
        expected: What a value is, for people who gave another.
        read: Returns the value that a text means; None if it means none.
    """

    default: Value
    expected: str
    read: Callable[[str], Value | None]


def whole(default: int) -> Option:
    """An option that is a whole number."""
    read = _DIGITS.fullmatch
    return Option(
        default, f"a whole number such as {default}", lambda text: int(text) if read(text) else None
    )


def choice(*words: str) -> Option:
    """An option that is one of these words; the first is the default."""
    return Option(words[0], f"one of {', '.join(words)}", lambda text: text if text in words else None)


def canonical(name: str, options: Mapping[str, Value]) -> str:
    """Return the canonical spec of something with these options, which are in the documented order."""
    given = ",".join(f"{option}={value}" for option, value in options.items())
    return f"{name}:{given}" if given else name


class Registry(Generic[T]):
    """Everything of one kind, by name.

    Args:
        kind: What it is called: "codec".
        kinds: More of them: "codecs".
        example: A spec, for people who gave no string.
        most: Characters of the longest spec; what is longer is not repeated in errors.
    """

    def __init__(self, kind: str, kinds: str, example: str, most: int = 64) -> None:
        self._kind, self._kinds = kind, kinds
        self._example = example
        self._most = most
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
            raise ValueError(
                f"a {self._kind} spec is a string such as {self._example!r}, not {type(spec).__name__}"
            )
        if len(spec) > self._most:
            raise ValueError(f"a {self._kind} spec has at most {self._most} characters, not {len(spec)}")
        name, colon, text = spec.partition(":")
        if name not in self._known:
            raise ValueError(f"unknown {self._kind} {name!r}; {_nearest(name, self._known, self._kinds)}")
        make, known = self._known[name]
        given = _given(name, text, known) if colon else {}
        return make(**{option: given.get(option, takes.default) for option, takes in known.items()})


def _given(name: str, text: str, known: Mapping[str, Option]) -> dict[str, Value]:
    given: dict[str, Value] = {}
    for item in text.split(","):
        option, _, came = item.partition("=")
        if not known:
            raise ValueError(f"{name} takes no options, not {item!r}; write {name!r}")
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}; {_nearest(option, known, 'options')}")
        if option in given:
            raise ValueError(f"{name}: option {option!r} is given twice")
        value = known[option].read(came)
        if value is None:
            raise ValueError(f"{name}: {option} is {known[option].expected}, not {came!r}")
        given[option] = value
    return given


def _nearest(came: str, known: Iterable[str], what: str) -> str:
    names = list(known)
    near = difflib.get_close_matches(came.lower(), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{what} are {', '.join(names)}{hint}"
