"""The repository's Python files as syntax trees, for the tests of its architecture."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("averaging", "compression", "dht", "peer")


@dataclass(frozen=True, eq=False)
class Source:
    """One file, its path relative to the repository's root, and all nodes of its tree, each looked at by many tests."""

    path: Path
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    def __repr__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class Import:
    """One imported module; `name` is what is imported from it, if anything."""

    module: str
    name: str | None
    line: int
    for_typing: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def sources(*folders: str) -> list[Source]:
    """Every Python file below `folders`."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    gc.disable()  # It would look at all nodes again and again, which doubles the time.
    found = [_source(path) for path in paths]
    gc.freeze()
    gc.enable()
    return found


@functools.cache
def imports(source: Source) -> tuple[Import, ...]:
    """Every import of a file, wherever it stands."""
    typing_only = {id(node) for block in _typing_blocks(source) for node in ast.walk(block)}
    found: list[Import] = []
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found += (Import(alias.name, None, node.lineno, id(node) in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += (
                Import(module, alias.name, node.lineno, id(node) in typing_only) for alias in node.names
            )
    return tuple(found)


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called, as `torch.load`; other callees are skipped."""
    for node in source.nodes:
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name:
                yield name, node


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return ""


def _typing_blocks(source: Source) -> Iterator[ast.If]:
    for node in source.nodes:
        if isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING"):
            yield node


@functools.cache
def _source(path: Path) -> Source:
    text = path.read_text()
    tree = ast.parse(text, str(path))
    return Source(path.relative_to(ROOT), text, tree, tuple(ast.walk(tree)))
