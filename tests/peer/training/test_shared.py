"""Shared tables over runs that are queues within the test; `tests/e2e/test_shared.py` has real daemons."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from e2e.swarm import eventually
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.strategy import parse_strategy
from equipoise.peer import Lost, Refused, Run
from equipoise.peer.training import Shared

ROWS = 40


class Round:
    """A round that ends once all live peers are in it."""

    def __init__(self) -> None:
        self.outcome = Outcome(ok=False, reason="nobody came")

    def done(self) -> bool:
        return self.outcome.ok

    def result(self) -> Outcome:
        return self.outcome


class Net:
    """The messages and the rounds of some peers."""

    def __init__(self) -> None:
        self.queues: defaultdict[str, queue.Queue[Any]] = defaultdict(queue.Queue)
        self.live: list[str] = []
        self.lock = threading.Lock()
        self.waiting: dict[str, Round] = {}
        self.count = 0
        self.told: dict[str, str] = {}

    def run(self, peer: str, tensors: dict[str, torch.Tensor], spec: str) -> Run:
        def average(timeout: float, wait: bool) -> Round:
            assert not wait
            with self.lock:
                mine = Round()
                if peer not in self.live:
                    return mine
                self.waiting[peer] = mine
                if self.waiting.keys() >= set(self.live):
                    self.count += 1
                    weights = dict.fromkeys(sorted(self.waiting), 1.0)
                    outcome = Outcome(ok=True, reason="", round=self.count, contributors=weights)
                    for one in self.waiting.values():
                        one.outcome = outcome
                    self.waiting = {}
            return mine

        def send(to: str, topic: str, tensors: Any, codec: str, fields: Any) -> None:
            copies = {name: one.clone() for name, one in tensors.items()}
            told = json.loads(json.dumps(fields))
            self.queues[to].put(SimpleNamespace(sender=peer, script=f"{peer}'s", tensors=copies, fields=told))

        def receive(topic: str, timeout: float) -> Any:
            try:
                message = self.queues[peer].get(timeout=timeout)
            except queue.Empty:
                return None
            return message if peer in self.live else None

        script = SimpleNamespace(hex=lambda: f"{peer}'s")
        core = SimpleNamespace(
            strategy=parse_strategy(spec),
            refuse_if_trained=lambda: None,
            binding=SimpleNamespace(tensors=lambda: tensors),
            channels=SimpleNamespace(mailbox=SimpleNamespace(script=script), send=send, receive=receive),
            branch=lambda name, *_, **__: SimpleNamespace(name=name, average=average, leave=lambda: None),
            finishing=[],
            link=SimpleNamespace(lost=None),
            trained_by="",
            tell=lambda _, line: self.told.update({peer: line}),
            undone_on_failure=contextlib.nullcontext,
        )
        self.live = sorted([*self.live, peer])

        class Joined(SimpleNamespace):
            @property
            def members(_) -> tuple[str, ...]:  # noqa: N805
                return tuple(sorted(self.live))

        return cast(Run, Joined(name="run", peer=peer, core=core, agree=lambda _: None))


@pytest.fixture
def net() -> Net:
    return Net()


def sharing(net: Net, count: int, spec: str, optimizer: str = "sgd:lr=1") -> list[Shared]:
    runs = [
        net.run(f"peer{at}", {"x": torch.zeros(ROWS, 3), "y": torch.ones(5)}, spec) for at in range(count)
    ]
    tables = [Shared(run, optimizer) for run in runs]
    eventually(lambda: all(one.view and len(one.view.members) == count for one in tables), "a view of all")
    return tables


def leave(tables: list[Shared]) -> None:
    with ThreadPoolExecutor(len(tables)) as pool:
        list(pool.map(lambda one: one.run.core.finishing[0](), tables))


def count_up(table: Shared, clocks: int, ids: torch.Tensor) -> int:
    """Add 1 to rows of `x` in each clock; return how many times that was acknowledged."""
    pushed = []
    for _ in range(clocks):
        rows = table.pull(x=ids)
        rows["x"].backward(torch.full_like(rows["x"], -1.0))
        pushed.append(table.push())
        table.clock()
    ends = [one.exception(30.0) for one in pushed]
    assert all(one is None or isinstance(one, Lost | Refused) for one in ends)
    return ends.count(None)


def test_every_push_counts_once_and_all_read_it(net: Net) -> None:
    tables = sharing(net, 3, "shared:staleness=2")
    ids = torch.tensor([39, 0, 17, 17, 3])
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda one: count_up(one, 15, ids), tables)) == [15] * 3
    for table in tables:
        rows = table.pull(x=torch.arange(ROWS), y=torch.tensor([4]))
        assert rows["x"].sum() == 3 * 15 * 3 * len(ids)
        assert (rows["x"][17] == 2 * 15 * 3).all()
        assert rows["y"].tolist() == [1.0]
        assert table.version("x") >= 45
    leave(tables)


def test_the_others_go_on_where_one_is_gone(net: Net) -> None:
    tables = sharing(net, 3, "shared:staleness=1")
    ids = torch.arange(ROWS)
    assert [count_up(one, 1, ids) for one in tables[:2]] == [1, 1]
    net.live.remove("peer2")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: count_up(one, 10, ids), tables[:2])) == [10, 10]
    for table in tables[:2]:
        assert table.view is not None
        assert table.view.members == ("peer0", "peer1")
        assert (table.pull(x=ids)["x"] == 22.0).all()
    leave(tables)


def test_what_does_not_fit_is_refused(net: Net) -> None:
    tables = sharing(net, 2, "shared:staleness=0,timeout=2")
    with pytest.raises(ValueError, match="expected ids of table 'x', int64 below 40"):
        tables[0].pull(x=torch.tensor([ROWS]))
    with pytest.raises(ValueError, match="expected one of the tables x, y, got 'z'"):
        tables[0].pull(z=torch.tensor([0]))
    rows = tables[0].pull(x=torch.tensor([0]))
    rows["x"].sum().mul(float("nan")).backward()
    with pytest.raises(Refused, match="expected finite gradients"):
        tables[0].push().result(30.0)
    tables[0].clock()
    with pytest.raises(
        Refused, match=r"a pull waited 2 s for \.\.peer1, which is at clock 0, and this peer at 1"
    ):
        tables[0].pull(x=torch.tensor([0]))
    leave(tables)


def test_a_dense_module_moves_as_a_whole(net: Net) -> None:
    modules = [torch.nn.Linear(4, 2) for _ in range(2)]
    runs = [
        net.run(f"peer{at}", Shared.of(module), "shared:staleness=0,copies=1")
        for at, module in enumerate(modules)
    ]
    tables = [Shared(run, "adam:lr=0.01") for run in runs]

    def train(index: int) -> None:
        for _ in range(5):
            tables[index].pull()
            modules[index](torch.ones(1, 4)).sum().backward()
            tables[index].push()
            tables[index].clock()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    for table in tables:
        table.pull()
    for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(one, other)
    leave(tables)
