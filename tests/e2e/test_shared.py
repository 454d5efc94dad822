"""Shared tables on real daemons: what is acknowledged counts once, also where a peer is killed."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from e2e.learners import count_up, daemons
from e2e.swarm import DaemonProcess, Swarm, eventually
from e2e.test_channels import connected
from equipoise.peer import Client, Lost, Refused, Run
from equipoise.peer.training import Shared

PEERS = 3
ROWS = 40
SOON = 60.0


def sharing(clients: list[Client], name: str, spec: str, optimizer: str = "sgd:lr=1") -> list[Shared]:
    """The peers' tables, once one view has them all."""
    runs = [
        client.join(name, {"x": torch.zeros(ROWS, 3), "y": torch.ones(5)}, strategy=spec)
        for client in clients
    ]
    eventually(lambda: all(len(run.members) == len(runs) for run in runs), "all peers of the run")
    tables = [Shared(run, optimizer) for run in runs]
    members = tuple(sorted(run.peer for run in runs))
    eventually(lambda: all(one.view and one.view.members == members for one in tables), "a view of all")
    return tables


def test_every_push_counts_once_and_all_peers_read_it(places: list[DaemonProcess]) -> None:
    with connected(places) as clients:
        tables = sharing(clients, "counts", "shared:staleness=2")
        ids = torch.tensor([39, 0, 17, 17, 3])
        with ThreadPoolExecutor(PEERS) as pool:
            assert list(pool.map(lambda one: count_up(one, 15, ids), tables)) == [15] * PEERS
        for table in tables:
            rows = table.pull(x=torch.arange(ROWS), y=torch.tensor([4]))
            assert rows["x"].sum() == 3 * 15 * PEERS * len(ids)
            assert (rows["x"][17] == 2 * 15 * PEERS).all()
            assert rows["y"].tolist() == [1.0]
            assert table.version("x") > 0
            with pytest.raises(ValueError, match="expected ids of table 'x', int64 below 40"):
                table.pull(x=torch.tensor([ROWS]))
        leaving = [threading.Thread(target=one.run.leave) for one in tables]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join(SOON)
        assert not any(thread.is_alive() for thread in leaving)


def test_the_others_go_on_where_a_daemon_is_killed(swarm: Swarm) -> None:
    places = daemons(swarm, PEERS)
    with connected(places) as clients:
        tables = sharing(clients, "killed", "shared:staleness=1,timeout=60")
        ids = torch.arange(ROWS)
        before = [count_up(one, 1, ids) for one in tables[:2]]
        dead = tables[2].run.peer
        places[2].kill()
        with ThreadPoolExecutor(2) as pool:
            after = list(pool.map(lambda one: count_up(one, 10, ids), tables[:2]))
        assert before == [1, 1]
        assert after == [10, 10]
        for table in tables[:2]:
            assert table.view is not None
            assert dead not in table.view.members
            assert (table.pull(x=ids)["x"] == 22.0).all()


def test_a_dense_module_moves_as_a_whole(places: list[DaemonProcess]) -> None:
    with connected(places[:2]) as clients:
        modules = [torch.nn.Linear(4, 2) for _ in clients]
        runs: list[Run] = [
            client.join("dense", Shared.of(module), strategy="shared:staleness=0,copies=1")
            for client, module in zip(clients, modules, strict=True)
        ]
        eventually(lambda: all(len(run.members) == 2 for run in runs), "both peers")
        tables = [Shared(run, "adam:lr=0.01") for run in runs]
        target = torch.nn.Linear(4, 2)

        def train(index: int) -> float:
            loss = torch.zeros(())
            for _ in range(20):
                tables[index].pull()
                x = torch.randn(16, 4)
                loss = (modules[index](x) - target(x).detach()).square().mean()
                loss.backward()
                tables[index].push()
                tables[index].clock()
            return float(loss.detach())

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(train, range(2)))
        for table in tables:
            table.pull()
        first, second = ([one.detach() for one in module.parameters()] for module in modules)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def show(waits: list[list[tuple[float, float]]], down: list[tuple[int, float, float]]) -> None:
    """Print how long pulls of peers took whose daemons were up, and when the others' pulls went on after each kill."""
    others = [
        end - began
        for index, one in enumerate(waits)
        for began, end in one
        if not any(at == index and began < up and end > dead for at, dead, up in down)
    ]
    print(
        f"{len(others)} pulls of peers with a daemon: longest {[round(one, 1) for one in sorted(others)[-10:]]}"
    )
    for index, dead, up in down:
        ends = [end for at, one in enumerate(waits) if at != index for _, end in one if end > dead]
        print(f"down for {up - dead:.1f} s; pulls went on after {min(ends) - dead:.1f} s")


@pytest.mark.slow
def test_owners_are_killed_every_five_seconds_and_pulls_go_on(swarm: Swarm) -> None:
    """Of six daemons one is killed, and started again, every 5 s for a minute. Prints how long pulls have waited."""
    places = daemons(swarm, 6)
    with connected(places) as clients:
        tables = sharing(clients, "often", "shared:staleness=inf,copies=3,timeout=20")
        over, ids = threading.Event(), torch.arange(ROWS)
        waits: list[list[tuple[float, float]]] = [[] for _ in tables]
        down: list[tuple[int, float, float]] = []

        def work(index: int) -> tuple[int, int]:
            pushed, refused = [], 0
            while not over.wait(0.3):
                began = time.monotonic()
                try:
                    rows = tables[index].pull(x=ids)
                except Refused:
                    refused += 1
                    continue
                waits[index].append((began, time.monotonic()))
                rows["x"].backward(torch.full_like(rows["x"], -1.0))
                pushed.append(tables[index].push())
                tables[index].clock()
            counted = 0
            for one in pushed:
                with contextlib.suppress(Lost, Refused):
                    one.result(60.0)
                    counted += 1
            return counted, len(pushed) - counted + refused

        def kill() -> None:
            for turn in range(12):
                views = eventually(lambda: [one.view for one in tables if one.view], "a view")
                owner = views[0].holders(turn)[0]
                index = next(at for at, one in enumerate(tables) if one.run.peer == owner)
                began = time.monotonic()
                places[index].kill()
                places[index].start()
                down.append((index, began, time.monotonic()))
                over.wait(max(5.0 - (time.monotonic() - began), 0.0))

        with ThreadPoolExecutor(7) as pool:
            working = [pool.submit(work, index) for index in range(6)]
            try:
                pool.submit(kill).result()
                before = [len(one) for one in waits]
                going = "pulls of all workers after the last kill"
                eventually(lambda: all(len(one) > was for one, was in zip(waits, before, strict=True)), going)
            finally:
                over.set()
            ended = [one.result() for one in working]
        show(waits, down)
        print("counted, lost", ended)
        counted = sum(one for one, _ in ended)
        assert (tables[0].pull(x=ids)["x"] >= counted).all(), "an acknowledged push is lost"
