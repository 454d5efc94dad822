"""Pipelines of real daemons beside one process that has the whole model, and while peers die."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch

from e2e.learners import LISTEN, daemons
from e2e.swarm import DaemonProcess, Swarm
from e2e.threads import begin, settle, together
from equipoise.averaging import pipeline as machine
from equipoise.peer import DaemonLost, Refused, connect
from equipoise.peer.training import Pipeline

PEERS = 3
SAMPLES, WIDTH = 12, 8


_drawing = threading.Lock()


def parts(count: int) -> list[torch.nn.Module]:
    """A model in so many parts, the same each time, also where several threads ask: they share torch's generator."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        ends = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)]
        return [*(torch.nn.Sequential(one, torch.nn.Tanh()) for one in ends[:-1]), ends[-1]]


def sgd(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def batch(step: int, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1000 * step + owner)
    inputs = torch.randn(SAMPLES, WIDTH, generator=chance)
    return inputs, inputs.flip(1).sin()


mean_squares = torch.nn.functional.mse_loss


def alone(count: int, steps: int, owners: Sequence[int]) -> tuple[list[float], list[torch.nn.Module]]:
    """One process with the whole model and all data."""
    model = parts(count)
    optimizer, losses = sgd(torch.nn.Sequential(*model).parameters()), []
    for step in range(steps):
        batches = [batch(step, owner) for owner in owners]
        output = torch.cat([one for one, _ in batches])
        for part in model:
            output = part(output)
        loss = mean_squares(output, torch.cat([one for _, one in batches]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small matrices are faster so, with as many scripts as there are peers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def like(pipe: Pipeline, model: list[torch.nn.Module], error: float = 1e-5) -> bool:
    """Whether a peer's part has the parameters of the whole model."""
    pairs = zip(pipe.module.parameters(), model[pipe.stage].parameters(), strict=True)
    return all(torch.allclose(mine, whole, atol=error) for mine, whole in pairs)


def train(
    place: DaemonProcess, stage: int | str, owner: int, peers: int, parts_: int, steps: int, **options: Any
) -> tuple[list[float], Pipeline]:
    """The script of a peer: so many updates of the group."""
    loss = options.pop("loss", mean_squares)
    with connect(place.home) as client, client.join("whole", [torch.zeros(1)], codec="fp32") as run:
        run.wait_for(peers - 1)
        pipe = Pipeline(run, parts(parts_), stage=stage, optimizer=sgd, **{"codec": "raw", **options})
        losses = []
        while (step := pipe.optimizer.epoch) < steps:
            losses.append(pipe.step(*batch(step, owner), loss))
        pipe.finish()
        return losses, pipe


def test_peers_take_stages_by_themselves_and_train_as_one_process_does(
    places: list[DaemonProcess],
) -> None:
    steps = 6
    ends = together(
        lambda place, owner: train(place, "auto", owner, PEERS, 2, steps, micro_batches=4),
        places,
        range(PEERS),
    )
    owners = [owner for owner, (_, pipe) in enumerate(ends) if pipe.stage == 0]
    assert sorted(pipe.stage for _, pipe in ends) == [0, 0, 1]
    expected, model = alone(2, steps, owners)
    of_last = next(losses for losses, pipe in ends if pipe.stage == 1)
    assert of_last == pytest.approx(expected, rel=1e-5)
    assert all(pipe.optimizer.epoch == steps and like(pipe, model) for _, pipe in ends)


def test_a_stage_without_a_peer_is_named(
    places: list[DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "NOBODY_SECONDS", 0.5)
    with connect(places[0].home) as client, client.join("lonely", [torch.zeros(1)]) as run:
        pipe = Pipeline(run, parts(3), stage=1)
        with pytest.raises(Refused, match="run 'lonely': no peer holds stage 0 or 2; start one"):
            pipe.step(None, None, mean_squares)
        with pytest.raises(Refused, match="is stepped by Pipeline already"):
            Pipeline(run, parts(3), stage=1)


def test_a_replica_that_dies_in_mid_update_costs_no_micro_batch(swarm: Swarm) -> None:
    places, steps = daemons(swarm, 3), 8

    def dying(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:  # With some counted, and others under way; a slow replica gets few.
            places[2].kill()
        return mean_squares(output, targets)

    def script(index: int) -> tuple[list[float], Pipeline] | None:
        loss = dying if index == 2 else mean_squares
        with contextlib.suppress(DaemonLost) if index == 2 else contextlib.nullcontext():
            return train(places[index], min(index, 1), 0, 3, 2, steps, schedule="1f1b", loss=loss)
        return None

    calls: list[int] = []
    ends = together(script, range(3))
    assert ends[2] is None
    expected, model = alone(2, steps, [0])
    for losses, pipe in filter(None, ends):
        assert losses == pytest.approx(expected, rel=1e-5) or pipe.stage == 1
        assert like(pipe, model)


SIX = (0, 0, 1, 1, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "steps"), [("raw", 20), ("fp16", 200), ("int8", 200)])
def test_four_stages_of_six_peers_train_as_one_process_does(swarm: Swarm, codec: str, steps: int) -> None:
    places = daemons(swarm, 6)
    start = threading.Barrier(6)

    def script(index: int) -> tuple[list[float], Pipeline]:
        with connect(places[index].home) as client, client.join("six", [torch.zeros(1)], codec="fp32") as run:
            pipe = Pipeline(run, parts(4), 4, codec, stage=SIX[index], optimizer=sgd)
            start.wait(150.0)
            losses = [pipe.step(*batch(step, index), mean_squares) for step in range(steps)]
            pipe.finish()
            return losses, pipe

    began = time.monotonic()
    ends = together(script, range(6))
    expected, model = alone(4, steps, [0, 1])
    losses, tail = ends[5][0], slice(-20, None)
    mine, whole = sum(losses[tail]) / 20, sum(expected[tail]) / 20
    print(f"{codec}: loss of the last 20 updates {mine:.6f}, of one process {whole:.6f}", end="; ")
    print(f"{steps / (time.monotonic() - began):.2f} updates a second")
    if codec == "raw":
        assert losses == pytest.approx(expected, rel=1e-5)
        assert all(like(pipe, model) for _, pipe in ends)
    assert mine == pytest.approx(whole, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_a_replica_killed_every_ten_seconds_nothing_is_lost_or_counted_twice(swarm: Swarm) -> None:
    stages, seconds, every, updates = (0, 1, 1, 2, 2, 3), 60.0, 10.0, dict[bool, list[float]]()

    def script(place: DaemonProcess, stage: int, name: str, over: threading.Event) -> Pipeline | None:
        try:
            with connect(place.home) as client, client.join(name, [torch.zeros(1)], codec="fp32") as run:
                run.wait_for(len(stages) - 1, 20.0)
                pipe = Pipeline(run, parts(4), 8, "raw", "1f1b", stage=stage, optimizer=sgd)
                while not over.is_set():
                    step = pipe.optimizer.epoch
                    loss = pipe.step(*batch(step, 0), mean_squares)
                    ready[place] = stage
                    if stage == 0:
                        updates[name == "killed"].append(loss)
                        if time.monotonic() > ends_at[0]:
                            over.set()
                pipe.finish()
                return pipe
        except (DaemonLost, Refused):
            if place in places and not over.is_set():  # One that is killed is taken out before.
                raise
        return None

    for killed in (False, True):
        over, updates[killed], ready, kills = threading.Event(), [], dict[DaemonProcess, int](), 0
        places = dict(zip(daemons(swarm, 6), stages, strict=True))
        name = "killed" if killed else "calm"
        ends_at = [time.monotonic() + 20.0 + seconds]
        scripts = [begin(script, place, stage, name, over) for place, stage in places.items()]
        chance = Random(7)
        while killed and time.monotonic() < ends_at[0] - every:
            over.wait(every)
            held = [stage for place, stage in ready.items() if place.running]
            able = [place for place, stage in ready.items() if place.running and held.count(stage) > 1]
            if not able:
                continue
            victim = chance.choice(able)
            stage, kills = places.pop(victim), kills + 1
            victim.kill()
            place = swarm.daemon(join=[next(iter(places)).address], args=LISTEN)
            places[place] = stage
            scripts.append(begin(script, place, stage, name, over))
        settle(scripts, 240.0)
        expected, _ = alone(4, len(updates[killed]), [0])
        error = max(abs(mine - whole) for mine, whole in zip(updates[killed], expected, strict=True))
        print(
            f"{name}: {kills} killed, {len(updates[killed])} updates, loss {updates[killed][-1]:.6f}, error {error:.2g}"
        )
        assert error < 1e-3, "each update had exactly the micro-batches of one process"
    assert len(updates[True]) >= 0.6 * len(updates[False])
