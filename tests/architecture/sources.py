"""The repository's Python files as syntax trees, for the tests of its architecture."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("averaging", "compression", "dht", "peer")


@dataclass(frozen=True)
class Source:
    """One file, its path relative to the repository's root."""

    path: Path
    text: str
    tree: ast.Module

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
    return [_source(path) for path in paths]


def imports(source: Source) -> Iterator[Import]:
    """Every import of a file, wherever it stands."""
    typing_only = {id(node) for block in _typing_blocks(source.tree) for node in ast.walk(block)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (
                Import(alias.name, None, node.lineno, id(node) in typing_only) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (
                Import(module, alias.name, node.lineno, id(node) in typing_only) for alias in node.names
            )


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called, as `torch.load`; other callees are skipped."""
    for node in ast.walk(source.tree):
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


def _typing_blocks(tree: ast.Module) -> Iterator[ast.If]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING"):
            yield node


def _source(path: Path) -> Source:
    text = path.read_text()
    return Source(path.relative_to(ROOT), text, ast.parse(text, str(path)))
