"""Names that say nothing, and notes to self, are not let in."""

from __future__ import annotations

import ast
import re

from architecture.sources import PACKAGES, ROOT, Source, calls, sources

VAGUE_MODULES = {"utils", "util", "helpers", "helper", "common", "misc"}

VAGUE_CLASS = re.compile(r"(Manager|Helper)s?$")

# Written in halves so that this file does not find itself.
NOTE_TO_SELF = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")

MAY_POLL = {"tests/e2e/swarm.py", "tests/dht/conftest.py"}
"""`eventually` and `until` there poll conditions of other processes; no other test sleeps."""

FOLDERS = (*PACKAGES, "tests", "scripts")


def test_no_module_has_a_vague_name() -> None:
    assert not [source for source in sources(*FOLDERS) if source.path.stem in VAGUE_MODULES]


def test_no_class_has_a_vague_name() -> None:
    assert not [
        (source, node.name)
        for source in sources(*FOLDERS)
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and VAGUE_CLASS.search(node.name)
    ]


def test_no_notes_to_self() -> None:
    assert not [source for source in sources(*FOLDERS) if NOTE_TO_SELF.search(source.text)]


def test_tests_wait_for_conditions_and_do_not_sleep() -> None:
    sleeps = [
        (source, call.lineno)
        for source in sources("tests")
        if str(source.path) not in MAY_POLL
        for name, call in calls(source)
        if name.rpartition(".")[2] == "sleep" and not _is_zero(call)
    ]
    assert not sleeps


def test_tests_mirror_the_code() -> None:
    """A test stands in its module's folder, and its name begins with that of the module, or of the folder."""
    tests = sources(*(f"tests/{package}" for package in PACKAGES))
    assert not [source for source in tests if source.path.stem.startswith("test_") and not _mirrors(source)]


def test_architecture_has_the_states_of_every_machine_and_names_its_events_as_the_code_does() -> None:
    _, _, text = (ROOT / "ARCHITECTURE.md").read_text().partition("## The machines")
    text, _, _ = text.partition("## The timing budget")
    nodes = [(source.path, node) for source in sources("averaging", "peer/training") for node in source.nodes]
    machines = {
        path
        for path, node in nodes
        if isinstance(node, ast.FunctionDef) and node.name == "handle" and "now" in ast.unparse(node.args)
    }
    assert len(machines) >= 7
    assert not [path for path in machines if path.name not in text or str(path.parent) not in text]
    diagrams = "".join(re.findall(r"^```\n(.*?)^```$", text, re.M | re.S))
    names = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", diagrams))
    assert names <= {node.name for _, node in nodes if isinstance(node, ast.ClassDef)}


def test_a_joiners_life_is_told_with_the_states_and_messages_that_the_code_has() -> None:
    life = _life("joiner")
    classes = {
        stem: _classes("averaging/matchmaking", stem)
        for stem in ("joiner", "messages", "events", "coordinator")
    }
    states = {node.name for node in classes["joiner"] if "State" in map(ast.unparse, node.bases)}
    named = {node.name for nodes in classes.values() for node in nodes} | {"Membership", "Join"}
    told = set(re.findall(r"\b[A-Z][A-Za-z]+\b", life))
    assert states == {"Idle", "Looking", "Asking", "Parked", "Coordinating"} & told
    assert set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", life)) <= named
    assert {"JoinRequest", "JoinAccepted", "JoinRefused", "Invitation", "GroupFormed", "Late"} <= told & named


def test_a_newcomers_life_is_told_with_the_phases_and_events_that_the_code_has() -> None:
    life = _life("newcomer")
    [replication] = [one for one in sources("averaging/replication") if one.path.stem == "follower"]
    assigned = {ast.unparse(one.targets): one for one in replication.nodes if isinstance(one, ast.Assign)}
    phases = {node.id for node in ast.walk(assigned["Phase"].value) if isinstance(node, ast.Name)}
    assert phases == set(re.findall(r"\b(?:Joining|Following|Behind)\b", life))
    named = {node.name for node in _classes("averaging/replication", "events")}
    assert set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", life)) <= named
    told = set(re.findall(r"\b[A-Z][A-Za-z]+\b", life)) & named
    assert {"Meet", "FetchSnapshot", "FetchMean", "Heal", "Commit", "Check", "Written"} <= told


def _life(whose: str) -> str:
    """The section of ARCHITECTURE that tells a life, in at most forty lines."""
    _, title, text = (ROOT / "ARCHITECTURE.md").read_text().partition(f"### A {whose}'s life\n")
    life = re.split(r"^##", text, maxsplit=1, flags=re.M)[0]
    assert title
    assert len(life.splitlines()) <= 40
    return life


def _classes(folder: str, stem: str) -> list[ast.ClassDef]:
    [module] = [source for source in sources(folder) if source.path.stem == stem]
    return [node for node in module.nodes if isinstance(node, ast.ClassDef)]


def _mirrors(source: Source) -> bool:
    folder = ROOT / source.path.parent.relative_to("tests")
    names = {folder.name} | {module.stem for module in folder.glob("*.py")}
    return any(f"{source.path.stem}_".startswith(f"test_{name}_") for name in names)


def _is_zero(call: ast.Call) -> bool:
    """Whether it is `asyncio.sleep(0)`, which only lets other tasks run."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
