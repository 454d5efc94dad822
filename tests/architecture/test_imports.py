"""Who may import what, where import-linter cannot say it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable

from architecture.sources import PACKAGES, ROOT, Import, Source, calls, imports, sources

IMPURE = {
    "asyncio",
    "concurrent",
    "datetime",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "random",
    "secrets",
    "select",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
"""Clocks, sources of chance, sockets, files, processes and loops: what a machine is given, never takes."""

UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}

UNSAFE_CALLS = {"eval", "exec", "os.popen", "os.system", "torch.load", "yaml.load"}

LATE = {
    ("averaging/schema.py", "torch"),
    ("compression/late_torch.py", "torch"),
    ("peer/cli/verbs.py", "equipoise.averaging"),  # numpy.
    ("peer/cli/verbs.py", "equipoise.peer.demo.options"),  # torch: the other verbs answer at once.
    ("peer/cli/verbs.py", "equipoise.peer.demo.swarm"),
    ("peer/daemon/daemon.py", "equipoise.peer.daemon"),  # hivemind: `import Peer` does without.
    ("peer/daemon/daemon.py", "equipoise.peer.daemon.exporter"),  # prometheus-client, an extra.
    ("peer/daemon/run_daemon.py", "equipoise.peer.daemon.daemon"),  # numpy, once OMP_NUM_THREADS is set.
    ("peer/demo/trainer.py", "sklearn.datasets"),  # An extra, which takes a second.
}
"""The imports within functions: of torch, and of modules that load a large or optional library."""

UNIONS = ("Event", "Action", "Move")
"""How the names of the unions of a machine's events and actions end."""


def test_no_bare_imports_of_the_packages() -> None:
    found = _found(sources(*PACKAGES, "tests", "scripts"), lambda one: one.top in PACKAGES)
    assert not found, "write equipoise.x instead"


def test_only_dht_imports_hivemind() -> None:
    assert not _found(sources("averaging", "compression", "peer"), lambda one: one.top == "hivemind")


def test_compression_imports_torch_and_numpy_only() -> None:
    own = {"equipoise", "torch", "numpy", "numba", "llvmlite", "triton", *sys.stdlib_module_names}
    assert not _found(sources("compression"), lambda one: one.top not in own)


def test_packages_import_no_tests() -> None:
    tests = {path.stem for path in (ROOT / "tests").iterdir()} - set(PACKAGES)
    assert not _found(sources(*PACKAGES), lambda one: one.top in tests)


def test_the_simulator_drives_the_daemons_endpoint_and_sessions_and_has_no_failure_detector_of_its_own() -> (
    None
):
    detector = "equipoise.averaging.allreduce.failure_detector"
    for folder in ("averaging/aio", "tests/simulator"):
        drivers = sources(folder)
        for shared in ("allreduce.endpoint", "session.outbox"):
            assert _found(drivers, lambda one: one.module == f"equipoise.averaging.{shared}"), folder  # noqa: B023
        assert not _found(drivers, lambda one: one.module == detector), folder
        assert not _found(drivers, lambda one: one.name == "failure_detector"), folder


def test_machines_read_no_clock_chance_socket_or_file() -> None:
    # A seeded Random may be made from a round's seed; the module's own functions draw from a hidden state.
    assert not _found(
        _machines(),
        lambda one: (
            one.top in IMPURE and not one.for_typing and (one.module, one.name) != ("random", "Random")
        ),
    )


def test_machines_seed_every_generator() -> None:
    unseeded = [
        (source, call.lineno)
        for source in _machines()
        for name, call in calls(source)
        if name in {"Random", "Generator", "torch.Generator", "default_rng"}
        and not (call.args or call.keywords)
    ]
    assert not unseeded


def test_machines_do_not_know_their_drivers() -> None:
    drivers = ("equipoise.averaging.aio", "equipoise.tasks", "uvloop")
    assert not _found(_machines(), lambda one: one.module.startswith(drivers))


def test_one_driver_runs_every_machine() -> None:
    machines = [source for source in sources(*PACKAGES) if any(map(_takes_events, source.nodes))]
    assert len(machines) >= 6
    fed = [
        (source, call.lineno)
        for source in sources(*PACKAGES)
        for name, call in calls(source)
        if name.endswith(".handle") and len(call.args) == 2 and source not in machines
    ]
    assert not fed, "use equipoise.tasks.Driver"


def test_events_actions_and_moves_are_declared_in_one_way() -> None:
    declared = {
        (str(source), name.id)
        for source in sources(*PACKAGES)
        for union in source.nodes
        if isinstance(union, ast.Assign) and isinstance(union.value, ast.BinOp)
        if ast.unparse(union.targets[0]).endswith(UNIONS)
        for name in ast.walk(union.value)
        if isinstance(name, ast.Name) and not name.id.endswith(UNIONS)
    }
    structs = {
        (str(source), node.name)
        for source in sources(*PACKAGES)
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["msgspec.Struct"]
    }
    assert len(declared) >= 60
    assert not declared - structs


def test_imports_stand_at_the_top_but_for_large_libraries() -> None:
    # `lint-imports` finds circles, and an import within a function is how a circle hides.
    late = {
        (str(source), one.module)
        for source in sources(*PACKAGES)
        for one in imports(source)
        if one.line in _lines_of_functions(source)
    }
    assert late == LATE


def test_nothing_is_unpickled_and_no_shell_is_started() -> None:
    everything = sources(*PACKAGES, "scripts")
    assert not _found(everything, lambda one: one.top in UNPICKLERS)
    unsafe = [
        (source, name, call.lineno)
        for source in everything
        for name, call in calls(source)
        if name in UNSAFE_CALLS or any(_true(keyword, "shell", "allow_pickle") for keyword in call.keywords)
    ]
    assert not unsafe


def test_decoders_are_made_when_their_module_is_imported() -> None:
    # msgspec crashes the process if two threads are the first to need a type, such as those of two clients.
    alone = {"averaging/ports.py", "peer/daemon/run_daemon.py", "peer/demo/trainer.py", "peer/demo/swarm.py"}
    late = [
        (source, call.lineno)
        for source in sources(*PACKAGES)
        if str(source.path) not in alone  # Called by modules, or by the only thread of a process.
        for name, call in _calls_of_functions(source)
        if name.startswith("msgspec.")
        and (name.endswith(".Decoder") or any(keyword.arg == "type" for keyword in call.keywords))
    ]
    assert not late


def _machines() -> list[Source]:
    """The protocol machines, and the simulator that drives them in virtual time."""
    return [source for source in sources("averaging", "tests/simulator") if source.path.parts[1] != "aio"]


def _takes_events(node: ast.AST) -> bool:
    """Whether this is a machine's `handle(self, event, now)`."""
    return isinstance(node, ast.FunctionDef) and node.name == "handle" and node.args.args[-1].arg == "now"


def _true(keyword: ast.keyword, *names: str) -> bool:
    return keyword.arg in names and getattr(keyword.value, "value", True) is not False


def _calls_of_functions(source: Source) -> list[tuple[str, ast.Call]]:
    """The calls within functions, which are not made when the module is imported."""
    bodies = [node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for body in bodies for node in ast.walk(body)}
    return [(name, call) for name, call in calls(source) if id(call) in inner]


def _lines_of_functions(source: Source) -> set[int]:
    bodies = (node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {line for body in bodies for line in range(body.lineno, (body.end_lineno or 0) + 1)}


def _found(files: list[Source], wrong: Callable[[Import], bool]) -> list[tuple[Source, int, str]]:
    return [(source, one.line, one.module) for source in files for one in imports(source) if wrong(one)]
