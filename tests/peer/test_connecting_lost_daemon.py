"""A daemon that ends under a script, and comes back: weather, and one line that says why."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.run import OPTIONS, SOON, together
from e2e.swarm import eventually
from equipoise.averaging.outcome import Idle, NoPeers
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.state import StateId
from equipoise.peer import Client, DaemonLost, Refused, Run, connect, connecting
from equipoise.peer.config import load
from equipoise.peer.connecting import WEATHER_LOOKS
from equipoise.peer.control.client import Link
from equipoise.peer.control.messages import AgreeRun, JoinRun
from equipoise.peer.embedded import DaemonThread
from equipoise.peer.errors import Unwelcome
from equipoise.peer.shared_memory import Region
from fakes.daemon import FakeNetwork

STATE = StateId(3, "a" * 64)


class Machine:
    """One home, its daemon, and a script that stays connected while daemons come and go."""

    def __init__(self, network: FakeNetwork, home: Path) -> None:
        self.network, self.home = network, home
        self.daemon = self.start()
        self.client: Client = connect(home)

    def start(self) -> DaemonThread:
        self.daemon = DaemonThread(load({"home": self.home}, {}))
        return self.daemon

    def close(self) -> None:
        self.client.close()
        self.daemon.stop()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Machine]]:
    network = FakeNetwork()
    network.install(monkeypatch)
    found = [Machine(network, tmp_path / f"home{index}") for index in range(2)]
    yield found
    for machine in found:
        machine.close()


def lose(machine: Machine, run: Run) -> str:
    """Stop its daemon; returns what the run then says of where it stands."""
    machine.daemon.stop()

    def said() -> str:
        state = run.state
        return state.reason if isinstance(state, NoPeers) and "the daemon" in state.reason else ""

    return eventually(said, "the loss")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("equipoise.peer")
    ]


def test_rounds_fail_with_the_cause_and_succeed_when_a_daemon_is_back(
    machines: list[Machine], caplog: pytest.LogCaptureFixture
) -> None:
    tensors = [torch.zeros(2), torch.full((2,), 4.0)]
    runs = [
        machine.client.join("digits", [own], **OPTIONS)
        for machine, own in zip(machines, tensors, strict=True)
    ]
    runs[0].accumulate([torch.ones(2)], weight=3)
    reason = lose(machines[0], runs[0])

    assert (
        f"the daemon on {machines[0].home} closed the connection: it was stopped (its Peer was closed)"
        in reason
    )
    for outcome in (runs[0].average(timeout=SOON), runs[0].step(timeout=SOON)):
        assert not outcome
        assert outcome.reason == reason
        assert outcome.started > 0
        assert not outcome.in_doubt, "no daemon heard of the round, and none voted"
    assert torch.equal(tensors[0], torch.zeros(2))
    runs[0].accumulate([torch.ones(2)], weight=1)
    assert runs[0].progress().swarm == 4.0
    with pytest.raises(DaemonLost, match="it was stopped"):
        machines[0].client.status()
    assert machines[0].client.lost == reason
    assert repr(machines[0].client).endswith(f"on {machines[0].home}: runs 'digits'; {reason}>")

    machines[0].start()
    eventually(lambda: runs[1].state == Idle(peers=1), "the other's return")
    assert all(together(*(lambda run=run: run.average(timeout=SOON) for run in runs)))
    torch.testing.assert_close(tensors[0], torch.full((2,), 2.0))
    runs[1].accumulate([torch.full((2,), 5.0)], weight=4)
    assert all(together(*(lambda run=run: run.step(timeout=SOON) for run in runs)))
    torch.testing.assert_close(runs[0].mean["0"], torch.full((2,), 3.0))
    assert machines[0].client.status().clients == 1
    assert repr(machines[0].client).endswith(f"(...peer3) on {machines[0].home}: runs 'digits'>")
    assert warnings(caplog) == [
        f"{reason.partition(';')[0]}; this script goes on without, and connects when one is back; "
        f"start it with: equipoise daemon --home {machines[0].home}"
    ]


def test_a_round_that_was_going_on_fails_and_its_memory_is_left_alone(machines: list[Machine]) -> None:
    tensor = torch.ones(2)
    run = machines[0].client.join("digits", [tensor], **OPTIONS)
    run.accumulate([torch.ones(2)], weight=3)
    pending = run.step(timeout=SOON, wait=False)
    machines[0].daemon.stop()
    machines[0].start()
    eventually(lambda: machines[0].client.peer_id == "peer3", "the new daemon")

    assert not pending.result()
    assert run.accumulated == 3.0
    assert torch.equal(tensor, torch.ones(2))


def test_a_script_that_goes_on_for_hours_without_its_daemon_keeps_no_frames_of_its_calls(
    machines: list[Machine],
) -> None:
    run = machines[0].client.join("digits", [torch.ones(2)], **OPTIONS)
    lose(machines[0], run)
    depths = set()
    for _ in range(20):
        with pytest.raises(DaemonLost) as caught:
            machines[0].client.status()
        depths.add(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert len(depths) == 1


def test_nothing_is_encoded_into_the_memory_of_a_lost_daemon(machines: list[Machine]) -> None:
    tensor = torch.ones(300)
    run = machines[0].client.join("digits", [tensor], **OPTIONS)
    assert not run.average(timeout=0.1)
    lose(machines[0], run)
    memory = run.core.region.contribution  # A daemon that was only stopped may still send what is here.
    before = bytes(memory)
    tensor.fill_(7.0)
    run.accumulate([torch.full((300,), 5.0)])
    assert not run.average(timeout=SOON)
    assert not run.step(timeout=SOON)
    assert bytes(memory) == before
    assert run.accumulated == 1.0


def test_a_fork_encodes_nothing_into_the_memory_of_its_parent(machines: list[Machine]) -> None:
    tensor = torch.ones(300)
    run = machines[0].client.join("digits", [tensor], **OPTIONS)
    assert not run.average(timeout=0.1)
    before = bytes(run.core.region.contribution)
    tensor.fill_(7.0)
    run.core._process += 1  # As it is after a fork.
    with pytest.raises(Refused, match="belongs to process"):
        run.average(timeout=SOON)
    run.accumulate([torch.full((300,), 5.0)])
    with pytest.raises(Refused, match="belongs to process"):
        run.step(timeout=SOON)
    assert bytes(run.core.region.contribution) == before


def test_what_was_agreed_on_is_agreed_on_again(machines: list[Machine]) -> None:
    models: list[Any] = [
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in machines
    ]
    runs = [
        machine.client.join("digits", model, **OPTIONS)
        for machine, model in zip(machines, models, strict=True)
    ]
    for run in runs:
        run.agree({"clip": "1.0"}, buffers=True)
    lose(machines[0], runs[0])
    machines[0].start()
    for run in runs:
        eventually(lambda run=run: run.state == Idle(peers=1), "each other")
    for index, (run, model) in enumerate(zip(runs, models, strict=True)):
        model(torch.ones(4, 2)).sum().backward()
        run.accumulate(model)
        model[1].running_mean.fill_(float(index))

    assert all(together(*(lambda run=run: run.step(timeout=SOON) for run in runs)))
    torch.testing.assert_close(models[0][1].running_mean, torch.full((2,), 0.5))


def test_what_a_daemon_would_do_is_weather_without_one(machines: list[Machine]) -> None:
    run = machines[0].client.join("digits", [torch.ones(2)], **OPTIONS)
    reason = lose(machines[0], run)

    run.core.tell("training", "it goes on")
    run.core.offer(STATE, b"image")
    assert run.core.fetch(Wish(1, 1000), SOON).result().reason == reason
    recovered = run.core.fetch(Wish(after=STATE), SOON)
    recovered.cancel()
    assert recovered.result().reason == reason
    assert not run.wait_for(1, timeout=0.1)
    run.leave()

    machines[0].start()
    eventually(lambda: machines[0].client.peer_id == "peer3", "the new daemon")
    assert machines[0].client.status().runs == ()


def test_a_daemon_of_another_version_is_told_of_once(
    machines: list[Machine], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, looks = machines[0].client, threading.Semaphore(0)
    monkeypatch.setattr(connecting, "MAX_PAUSE", connecting.FIRST_PAUSE)

    def refuse() -> Link:
        looks.release()
        raise Unwelcome("the daemon speaks another version")

    client._reopen = refuse
    machines[0].daemon.stop()
    for _ in range(WEATHER_LOOKS + 2):
        assert looks.acquire(timeout=30)

    assert warnings(caplog)[1:] == [
        "a daemon is back, but this script cannot use it yet: the daemon speaks another version"
    ]


def test_where_one_run_is_refused_no_run_goes_on(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, refused = machines[0].client, threading.Event()
    runs = [client.join(name, [torch.ones(2)], **OPTIONS) for name in ("one", "other")]

    def share(link: Link, request: JoinRun, agreed: AgreeRun | None = None) -> Region:
        if request.run == "other" and not refused.is_set():
            refused.set()
            raise Refused("it is taken")
        return sharing(link, request, agreed)

    sharing = connecting._share
    monkeypatch.setattr(connecting, "_share", share)
    reason = lose(machines[0], runs[0])
    machines[0].start()
    assert refused.wait(30)

    assert runs[0].average(timeout=SOON).reason == reason
    eventually(lambda: not client.lost, "the daemon")
    assert {run.name for run in client.status().runs} == {"one", "other"}


def test_a_client_that_is_closed_while_it_connects_leaves_no_connection(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = machines[0].client
    run = client.join("digits", [torch.ones(2)], **OPTIONS)
    links: list[Link] = []

    def share(link: Link, request: JoinRun, agreed: AgreeRun | None = None) -> Region:
        region = sharing(link, request, agreed)
        client.close()
        links.append(link)
        return region

    sharing = connecting._share
    monkeypatch.setattr(connecting, "_share", share)
    lose(machines[0], run)
    machines[0].start()
    eventually(lambda: links, "the new daemon")

    eventually(lambda: links[0].lost, "the end of its connection")
    with connect(machines[0].home) as other:
        eventually(lambda: other.status().clients == 0 and not other.status().runs, "the end of the run")
