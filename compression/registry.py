"""Registries of all that specs name, and what other packages add: entry points, loaded when a spec first names them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from equipoise.compression.grammar import Option, Value, canonical

T = TypeVar("T")

SHOWN_CHARS = 32
"""Most characters of a spec that is too long that its error repeats."""

MAX_ERROR_CHARS = 200
"""Most characters of another package's error that a message repeats."""

_VERSION = re.compile(r"[A-Za-z0-9_.!+-]{1,32}")


class Plugins(Generic[T]):
    """The entry points of one group.

    An entry point names a class. Its `options`, a mapping of names to `Option`, are what specs may give it. The
    version of its package becomes the last option of its canonical spec, so that only peers with equal versions meet.

    Args:
        group: As "equipoise.rules".
        base: Base of the classes; its objects keep their canonical spec in `spec`.
    """

    def __init__(self, group: str, base: type[object]) -> None:
        self._group = group
        self._base = base

    def names(self) -> list[str]:
        """The names that specs may use."""
        return sorted({point.name for point in entry_points(group=self._group)})

    def find(self, name: str) -> tuple[Callable[..., T], Mapping[str, Option]] | None:
        """Return what makes an object of this name, and its options; None if no installed package has the name.

        Raises:
            ValueError: It does not load, or is no such class, or two packages have the name; one line.
        """
        points = tuple(entry_points(group=self._group, name=name))
        if not points:
            return None
        packages = [point.dist.name if point.dist else "unknown" for point in points]
        if len(points) > 1:
            raise ValueError(f"{len(points)} packages have a {self._group} {name!r}: {', '.join(packages)}")
        told = f"the {self._group} {name!r} of the package {packages[0]}"
        version = points[0].dist.version if points[0].dist else None
        if not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise ValueError(f"{told} has no version of up to 32 characters, but {version!r:.80}")
        made, options = self._loaded(told, points[0])
        same = Option(
            version,
            f"{version}, the version of the package {packages[0]} here",
            lambda text: text if text == version else None,
        )
        return partial(self._make, name, told, made), {**options, "version": same}

    def _loaded(self, told: str, point: EntryPoint) -> tuple[Callable[..., Any], Mapping[str, Option]]:
        made = _guarded(f"{told} does not load", point.load)
        if not isinstance(made, type) or not issubclass(made, self._base):
            raise ValueError(f"{told} is no subclass of {self._base.__name__}")
        options = getattr(made, "options", {})
        if not isinstance(options, Mapping) or not all(isinstance(one, Option) for one in options.values()):
            raise ValueError(f"{told}: expected `options` to be options by name")
        return made, options

    def _make(self, name: str, told: str, made: Callable[..., Any], **options: Any) -> T:
        given = {option: value for option, value in options.items() if option != "version"}
        thing: Any = _guarded(f"{told} refuses", partial(made, **given))
        thing.spec = canonical(name, options)
        return thing  # type: ignore[no-any-return]


def _guarded(told: str, call: Callable[[], Any]) -> Any:
    """Call another package's code; whatever it raises becomes an error of one line."""
    try:
        return call()
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS]
        raise ValueError(f"{told}: {said}") from error


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
