"""Ctrl-C, as in a notebook: an interrupted call withdraws its round, and an interrupted constructor frees its run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.swarm import eventually
from equipoise.peer import Client, RoundPending, Run, connect, connecting
from equipoise.peer.client.interrupts import uninterrupted
from equipoise.peer.config import load
from equipoise.peer.embedded import DaemonThread
from equipoise.peer.training import DiLoCo, Federated, Gossip, LocalSGD
from fakes.daemon import FakeNetwork, FakeRunDriver


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    network = FakeNetwork()
    network.install(monkeypatch)
    return network


@pytest.fixture
def clients(network: FakeNetwork, tmp_path: Path) -> Iterator[list[Client]]:
    homes = [tmp_path / name for name in ("first", "second")]
    daemons = [DaemonThread(load({"home": home}, {})) for home in homes]
    clients = [connect(home) for home in homes]
    yield clients
    for client, daemon in zip(clients, daemons, strict=True):
        client.close()
        daemon.stop()


def interrupted(call: Callable[[], Any], when: Callable[[], Any]) -> None:
    """Make a call in the main thread, and interrupt it by a real SIGINT once `when` is true."""

    def interrupt() -> None:
        eventually(when, "the moment", 30.0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        interrupting.join()


@pytest.mark.parametrize("purpose", ["average", "step"])
def test_an_interrupted_search_is_withdrawn(clients: list[Client], purpose: str) -> None:
    tensor = torch.ones(4, requires_grad=True)
    with clients[0].join("notebook", {"w": tensor}) as run:
        run.accumulate({"w": torch.ones(4)}, 3.0)

        interrupted(lambda: getattr(run, purpose)(timeout=300.0), lambda: run.pending is not None)

        assert run.pending is None
        assert run.accumulated == 3.0
        assert tensor.tolist() == [1.0] * 4
        assert not getattr(run, purpose)(timeout=0.1)


def test_an_interrupted_exchange_ends_before_the_next_begins(
    network: FakeNetwork, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.full((4,), value) for value in (1.0, 3.0)]
    runs = [client.join("notebook", [one]) for client, one in zip(clients, tensors, strict=True)]
    network.held = True
    # A round that has begun goes on, whatever the script says.
    monkeypatch.setattr(FakeRunDriver, "stop", lambda run_driver, why: None)
    other = runs[1].average(timeout=60.0, wait=False)
    eventually(lambda: len(network.waiting.get("notebook", {})) == 1, "the other")

    interrupted(lambda: runs[0].average(timeout=60.0), lambda: len(network.waiting.get("notebook", {})) == 2)

    network.release()
    assert other.result()
    assert tensors[0].tolist() == [1.0] * 4
    later = runs[1].average(timeout=60.0, wait=False)
    assert runs[0].average(timeout=60.0)
    assert later.result()
    assert tensors[0].tolist() == tensors[1].tolist() == [1.5] * 4


def test_tensors_are_written_whole_or_not_at_all() -> None:
    reached = []

    def write() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_open_round_says_which_calls_end_it(clients: list[Client]) -> None:
    with clients[0].join("notebook", [torch.ones(4)]) as run:
        pending = run.average(timeout=300.0, wait=False)
        with pytest.raises(RoundPending, match=r"call \.result\(\) .*; \.cancel\(\) withdraws it"):
            run.average()

        pending.cancel()

        assert not pending.result()
        assert not run.average(timeout=0.1)


def optimizer(run: Run, wait_for: int) -> object:
    assert isinstance(run.core.binding.source, torch.nn.Module)
    sgd = torch.optim.SGD(run.core.binding.source.parameters(), 0.1)
    sgd = run.core.binding.source.__dict__.setdefault("made_in_an_earlier_cell", sgd)
    return run.optimizer(sgd, target_batch_size=8, batch_size=8, wait_for=wait_for)


LOOPS: dict[str, tuple[str, Callable[[Run, int], object]]] = {
    "optimizer": ("allreduce", optimizer),
    "DiLoCo": ("allreduce", lambda run, wait_for: DiLoCo(run, every=5, fragments=2, wait_for=wait_for)),
    "LocalSGD": ("allreduce", lambda run, wait_for: LocalSGD(run, every=5, wait_for=wait_for)),
    "Gossip": ("gossip", lambda run, wait_for: Gossip(run, every=5, wait_for=wait_for)),
    "Federated": (
        "federated",
        lambda run, wait_for: Federated(run, lambda task: (1.0, {}), rounds=1, wait_for=wait_for),
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_an_interrupted_constructor_leaves_the_run_free(clients: list[Client], loop: str) -> None:
    strategy, construct = LOOPS[loop]
    run = clients[0].join("notebook", torch.nn.Linear(2, 2), strategy=strategy)

    interrupted(lambda: construct(run, 1), lambda: run.core.loop.by)

    assert run.core.loop.by == ""
    assert construct(run, 0) is not None
    with pytest.raises(ValueError, match=r"stepped by .* already; end that with run.leave\(\)"):
        construct(run, 0)
    assert run.core.loop.by
    run.core.loop.give_up()
    run.leave()


@pytest.mark.parametrize("loop", [False, True])
def test_a_join_that_is_interrupted_can_be_made_again(
    clients: list[Client], monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    run = clients[0].join("notebook", torch.nn.Linear(2, 2))
    share = connecting._share

    def shares_at_last(*given: Any) -> Any:
        region = share(*given)
        signal.raise_signal(signal.SIGINT)
        return region

    def joins() -> object:
        return LOOPS["DiLoCo"][1](run, 0) if loop else clients[0].join("other", [torch.ones(4)])

    monkeypatch.setattr(connecting, "_share", shares_at_last)
    with pytest.raises(KeyboardInterrupt):
        joins()
    monkeypatch.setattr(connecting, "_share", share)

    assert joins() is not None
    run.core.loop.give_up()
    run.leave()


@pytest.mark.parametrize("loop", [DiLoCo, LocalSGD, Gossip])
def test_a_loop_without_its_run_says_which_argument_is_missing(loop: type) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'run'"):
        loop(every=10)
