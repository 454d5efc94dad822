"""Shared tables over runs that are queues within the test; `tests/e2e/test_shared.py` has real daemons."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from e2e.learners import count_up
from e2e.swarm import eventually
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.shared.rows import RowStore
from equipoise.averaging.strategy import parse_strategy
from equipoise.peer import Refused, Run
from equipoise.peer.errors import DaemonLost
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


def failed() -> Outcome:
    raise Refused("the daemon did not begin it")


class Net:
    """The messages and the rounds of some peers."""

    def __init__(self) -> None:
        self.queues: defaultdict[str, queue.Queue[Any]] = defaultdict(queue.Queue)
        self.live: list[str] = []
        self.lost: set[str] = set()
        self.silent: set[str] = set()
        self.sent, self.under_way = 0, False
        self.failing: set[str] = set()
        self.lock = threading.Lock()
        self.waiting: dict[str, Round] = {}
        self.count = 0
        self.told: dict[str, str] = {}

    def run(self, peer: str, tensors: dict[str, torch.Tensor], spec: str) -> Run:
        def average(timeout: float, wait: bool) -> Round:
            assert not wait
            if peer in self.failing:
                self.failing.remove(peer)
                return cast(Round, SimpleNamespace(done=lambda: True, result=failed))
            with self.lock:
                mine = Round()
                if peer not in self.live:
                    return mine
                self.waiting[peer] = mine
                if self.waiting.keys() >= {*self.live} - self.silent:
                    self.count += 1
                    weights = dict.fromkeys(sorted(self.waiting), 1.0)
                    outcome = Outcome(ok=True, reason="", round=self.count, contributors=weights)
                    for one in self.waiting.values():
                        one.outcome = outcome
                    self.waiting = {}
            return mine

        def send(to: str, topic: str, tensors: Any, codec: str, fields: Any) -> Any:
            copies = {name: one.clone() for name, one in tensors.items()}
            told = json.loads(json.dumps(fields))
            self.queues[to].put(SimpleNamespace(sender=peer, script=f"{peer}'s", tensors=copies, fields=told))
            self.sent += 1
            ended: Future[None] = Future()
            if not self.under_way:
                ended.set_result(None)
            return SimpleNamespace(done=lambda: not self.under_way, ended=ended)

        def receive(topic: str, timeout: float) -> Any:
            if peer in self.lost:
                raise DaemonLost("the daemon has gone")
            try:
                message = self.queues[peer].get(timeout=timeout)
            except queue.Empty:
                return None
            return message if peer in self.live and peer not in self.lost else None

        script = SimpleNamespace(hex=lambda: f"{peer}'s")
        core = SimpleNamespace(
            strategy=parse_strategy(spec),
            begin_training=lambda by: None,
            binding=SimpleNamespace(tensors=lambda: tensors),
            channels=SimpleNamespace(mailbox=SimpleNamespace(script=script), send=send, receive=receive),
            branch=lambda name, *_, **__: SimpleNamespace(name=name, average=average, leave=lambda: None),
            loop=SimpleNamespace(finishing=[], undone_on_failure=contextlib.nullcontext),
            link=SimpleNamespace(lost=None),
            left=False,
            tell=lambda _, line: self.told.update({peer: line}),
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
        list(pool.map(lambda one: one.run.core.loop.finishing[0](), tables))


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


def test_peers_that_have_ended_do_not_hold_up_the_others(net: Net) -> None:
    tables = sharing(net, 4, "shared:staleness=inf,copies=3,timeout=20")
    ids = torch.arange(ROWS)
    assert [count_up(one, 1, ids) for one in tables] == [1] * 4
    leave(tables[:2])  # Half of them, with the smallest PeerID.
    net.live = ["peer2", "peer3"]
    for table in tables[2:]:
        assert (table.pull(x=ids)["x"] == 4.0).all()
    leave(tables[2:])


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
    with pytest.raises(Refused, match=r"a pull waited 2 s: \.\.peer1 is at clock 0, and this peer at 1"):
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


def test_ids_may_be_a_list_and_a_push_cannot_be_cancelled(net: Net) -> None:
    tables = sharing(net, 2, "shared:staleness=inf")
    rows = tables[0].pull(x=[1, 3])  # type: ignore[arg-type]
    rows["x"].sum().backward()
    pushed = tables[0].push()
    assert not pushed.cancel()
    pushed.result(30.0)
    leave(tables)


def test_a_script_that_has_left_is_told_so(net: Net) -> None:
    tables = sharing(net, 2, "shared:staleness=inf")
    leave(tables)
    with pytest.raises(Refused, match="this script has left the run"):
        tables[0].pull(x=torch.tensor([1]))


def test_a_pull_ends_where_the_daemon_has_gone(net: Net) -> None:
    tables = sharing(net, 2, "shared:staleness=inf,timeout=1")
    net.lost.update(("peer0", "peer1"))
    with pytest.raises(Refused, match=r"a pull waited 1 s: rows of .*peer. have not come"):
        tables[0].pull(x=torch.arange(ROWS))
    leave(tables)


def test_a_round_that_no_daemon_began_is_followed_by_another(net: Net) -> None:
    net.failing.update(("peer0", "peer1"))
    leave(sharing(net, 2, "shared:staleness=inf"))


def test_rows_that_were_not_asked_for_are_refused(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = sharing(net, 2, "shared:staleness=inf")
    tables[0].pull(x=torch.tensor([1]))["x"].sum().backward()
    monkeypatch.setattr(RowStore, "read", lambda self, pull: {})
    with pytest.raises(Refused, match=r"the owner of shard 1 sent \[0\] values for 1 rows"):
        tables[0].pull(x=torch.tensor([1]))
    tables[0].push().result(30.0)
    assert tables[0].version("x") == 0, "rows of the pull before pass as rows of this one"
    leave(tables)


def test_nothing_is_said_again_while_the_last_message_is_under_way(net: Net) -> None:
    net.under_way = True
    tables = sharing(net, 2, "shared:staleness=inf")

    def wake() -> None:
        for table in tables:
            node = table._serving.node
            eventually(
                lambda at=node.deadline, node=node: node.deadline > at, "the next time to say all again"
            )

    wake()
    before = net.sent
    wake()
    assert net.sent == before
    leave(tables)


def test_a_peer_without_shared_tables_that_keeps_the_first_view_from_all_is_named(net: Net) -> None:
    net.run("silent", {}, "shared")
    net.silent.add("silent")
    table = Shared(net.run("peer0", {"x": torch.zeros(ROWS, 3)}, "shared"))
    told = "the first view has all live peers, and ..silent took no part in its round"
    eventually(lambda: net.told.get("peer0") == told, "its name")
    leave([table])
