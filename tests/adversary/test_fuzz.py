"""`scripts/fuzz.py` finds what is planted, knows all parsers, and finds nothing more in some thousands of cases."""

from __future__ import annotations

import ast
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import fuzz  # noqa: E402

DECODERS = {"Decoder", "FromString", "unpack", "unpack_from", "parser", "json.decode", "tomllib.loads"}
"""Calls that make values of bytes."""

PARTS = ("averaging", "compression", "dht", "peer")


@pytest.fixture(autouse=True)
def _quiet():
    """Some parsers log what they refuse."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def decoding(source: str) -> bool:
    """Tell whether a module decodes bytes: it calls a decoder, not only a parser of another module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.split(".")[-1] in DECODERS or name.endswith(
                tuple(f"{one}" for one in DECODERS if "." in one)
            ):
                return True
    return False


def test_every_module_that_decodes_is_fuzzed_or_trusted_for_a_reason() -> None:
    found = set()
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            if decoding(path.read_text()):
                found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    known = {parser.module for parser in fuzz.PARSERS.values()} | set(fuzz.TRUSTED)
    assert found - known == set(), "give scripts/fuzz.py a parser for these"
    assert {one for one in fuzz.TRUSTED if one not in found} == set(), "these decode nothing"


# Alone it takes ten seconds; beside others, in the large process of a worker, it took two minutes.
def test_ten_thousand_cases_find_nothing() -> None:
    assert list(fuzz.search(10_000, 20)) == []


@pytest.mark.parametrize(
    "path", sorted(fuzz.CASES.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_what_was_found_stays_mended(path: Path) -> None:
    assert fuzz.fault(fuzz.PARSERS[path.parent.name], path.read_bytes()) == ""


def _wait() -> bool:
    return not threading.Event().wait(1.1)


PLANTED: dict[str, tuple[str, Callable[[bytes], object]]] = {
    "an empty frame": ("round", lambda data: data[0]),
    "text that is not UTF-8": ("punch", lambda data: data.decode()),
    "a number beyond 63 bits": ("transfer", lambda data: b"\xcf\xff\xff" in data and 1 // 0),
    "values nested deeply": ("call", lambda data: b"\x91" * 100 in data and 1 // 0),
    "NaN": ("group", lambda data: b"\xcb\x7f\xf8\0\0\0\0\0\0" in data and 1 // 0),
    "a length that lies": ("mean", lambda data: bytearray(min(int.from_bytes(data[:4], "little"), 2**28))),
    "an announced array": ("token", lambda data: b"\xdd\xff" in data or (b"\xdf\xff" in data and 1 // 0)),
    "a truncated head": ("hello", lambda data: data[24]),
    "control characters": ("address", lambda data: b"\x1b" in data and 1 // 0),
    "time": ("dialback", lambda data: len(data) > 1000 and _wait()),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found(kind: str) -> None:
    name, breaks = PLANTED[kind]
    parser = fuzz.PARSERS[name]

    def parse(data: bytes) -> object:
        breaks(data)
        return parser.parse(data)

    planted = {name: parser._replace(parse=parse, refusals=(*parser.refusals,))}
    found = next(fuzz.search(3000, 1, planted), None)
    assert found is not None
    assert found[0] == name
