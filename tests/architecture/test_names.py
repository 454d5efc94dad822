"""Names that say nothing, and notes to self, are not let in."""

from __future__ import annotations

import ast
import re

from architecture.sources import PACKAGES, calls, sources

VAGUE_MODULES = {"utils", "util", "helpers", "helper", "common", "misc"}

VAGUE_CLASS = re.compile(r"(Manager|Helper)s?$")

# Written in halves so that this file does not find itself.
NOTE_TO_SELF = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")

MAY_POLL = {"tests/e2e/swarm.py", "tests/dht/conftest.py"}
"""`eventually` and `until` there poll conditions of other processes; no other test sleeps."""

FILES = sources(*PACKAGES, "tests", "scripts")


def test_no_module_has_a_vague_name() -> None:
    assert not [source for source in FILES if source.path.stem in VAGUE_MODULES]


def test_no_class_has_a_vague_name() -> None:
    assert not [
        (source, node.name)
        for source in FILES
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and VAGUE_CLASS.search(node.name)
    ]


def test_no_notes_to_self() -> None:
    assert not [source for source in FILES if NOTE_TO_SELF.search(source.text)]


def test_tests_wait_for_conditions_and_do_not_sleep() -> None:
    sleeps = [
        (source, call.lineno)
        for source in sources("tests")
        if str(source.path) not in MAY_POLL
        for name, call in calls(source)
        if name.rpartition(".")[2] == "sleep" and not _is_zero(call)
    ]
    assert not sleeps


def _is_zero(call: ast.Call) -> bool:
    """Whether it is `asyncio.sleep(0)`, which only lets other tasks run."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
