"""Additions of other packages to a registry: the entry points of a group, loaded when a spec first names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from equipoise.compression.grammar import Option, canonical

T = TypeVar("T")

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
