"""Files, functions and constructors stay small enough to be read."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from architecture.sources import PACKAGES, Source, sources

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_ARGUMENTS = 7

Function = ast.FunctionDef | ast.AsyncFunctionDef

FOLDERS = (*PACKAGES, "tests", "scripts")


def test_files_are_short() -> None:
    assert not [source for source in sources(*FOLDERS) if len(source.text.splitlines()) > MAX_FILE_LINES]


def test_functions_are_short() -> None:
    assert not [
        (source, function.name, _lines(function))
        for source in sources(*FOLDERS)
        for function in _functions(source)
        if _lines(function) > MAX_FUNCTION_LINES
    ]


def test_constructors_take_few_arguments() -> None:
    many = [
        (source, function.lineno, _arguments(function))
        for source in sources(*PACKAGES)
        for function in _functions(source)
        if function.name == "__init__" and _arguments(function) > MAX_CONSTRUCTOR_ARGUMENTS
    ]
    assert not many, "use a struct"


def _functions(source: Source) -> Iterator[Function]:
    return (node for node in source.nodes if isinstance(node, Function))


def _lines(function: Function) -> int:
    """Lines of a function without its docstring, which is for another reader."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def _arguments(function: Function) -> int:
    arguments = function.args
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
