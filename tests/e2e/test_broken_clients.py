"""Clients that are broken, hostile, or killed while they encode, and a daemon killed while they decode.

A broken client's own round fails. The other peers complete theirs, blame no peer, and average with it again later.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from e2e.fleet import Fleet, normal
from e2e.swarm import DaemonProcess, Swarm, eventually
from equipoise.averaging.outcome import Idle, Outcome
from equipoise.peer import connect
from equipoise.peer.client.encoding import SPAN_VALUES, Encoder

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]

VALUES, PART = 96 * 1024, 8 * 1024
"""Each of three owners has four parts."""

OPTIONS: dict[str, Any] = {"codec": "int8", "part_values": PART}

ROUNDS = 10
"""Rounds during which a script goes on writing to its contribution."""

BROKEN, HONEST = 2, (0, 1)

TRAINER = f"""
import signal, sys, torch
from equipoise.peer import connect
from equipoise.peer.client.encoding import Encoder
encode = Encoder._encode_span
def encode_one(*args):
    encode(*args)
    print("encoded one", flush=True)
    signal.pause()
with connect(sys.argv[1]) as peer:
    run = peer.join("fleet", {{"w": torch.zeros({2 * SPAN_VALUES})}}, codec="int8")
    assert run.wait_for(2)
    Encoder._encode_span = encode_one
    run.average()
"""
"""Encodes the first of the spans of its contribution, and then stands still."""


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DaemonProcess]]:
    """Three daemons, which each test leaves running."""
    swarm = Swarm(tmp_path_factory.mktemp("trio"))
    yield swarm.daemons(3, args=LISTEN)
    left = swarm.close()
    assert not left, swarm.logs()


def one_round(fleet: Fleet) -> list[Outcome]:
    """The outcomes of a round in which members contribute their values."""
    for tensor, value in zip(fleet.tensors, fleet.values, strict=True):
        tensor.copy_(value)
    return [pending.result() for pending in fleet.start([1.0] * len(fleet.runs))]


def whole_round(fleet: Fleet) -> list[Outcome]:
    return fleet.whole([1.0] * len(fleet.runs))


def check_honest(fleet: Fleet, outcomes: list[Outcome]) -> None:
    """The honest members hold the exact mean of those that are named, and blame no peer."""
    fleet.check({member: outcomes[member] for member in HONEST}, 0.010)
    blamed = [event for member in HONEST for event in outcomes[member].events if "do not decode" in event]
    assert not blamed


def test_values_that_change_while_they_are_read_are_sent_sound_or_not_at_all(
    trio: list[DaemonProcess],
) -> None:
    with Fleet(trio, normal(3, VALUES), **OPTIONS) as fleet:
        core = fleet.runs[BROKEN].core
        layout, vector = core.binding.averages.layout, core.region.contribution
        places = [layout.encoded(start, start + 1).start + 4 for start in range(0, VALUES, PART)]
        fleet.check(dict(enumerate(whole_round(fleet))), 0.010)
        sound, ended = [vector[place] for place in places], threading.Event()

        def write() -> None:
            for number in itertools.count():
                if ended.is_set():
                    return
                for place, code in zip(places, sound, strict=True):
                    vector[place] = code if number % 2 else 0x80

        writing = threading.Thread(target=write)
        try:
            writing.start()
            for _ in range(ROUNDS):
                outcomes = whole_round(fleet)
                check_honest(fleet, outcomes)
                told = outcomes[BROKEN]
                assert told.ok or told.reason.startswith("our own values: int8:block=128: code "), told
        finally:
            ended.set()
            writing.join()
        fleet.check(dict(enumerate(whole_round(fleet))), 0.010)


# ---- crashes ----


Place = tuple[str, str]
"""The device and inode of a file, as in /proc/PID/maps."""


def place_of(found: os.stat_result) -> Place:
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", str(found.st_ino)


def mapped(process: int) -> set[Place]:
    """The shared memory of ours that a process has mapped."""
    lines = [line.split() for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    return {(words[3], words[4]) for words in lines if words[-2:-1] == ["/memfd:equipoise"]}


def opened(process: int) -> Iterator[Place]:
    """The files that a process has open."""
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            yield place_of(path.stat())


def holders(place: Place) -> set[int]:
    """Processes that have shared memory mapped or open."""
    found = set()
    for process in psutil.pids():
        with contextlib.suppress(OSError):
            if place in mapped(process) or place in opened(process):
                found.add(process)
    return found


def test_a_trainer_killed_while_it_encodes_leaves_nothing_and_the_others_go_on(
    swarm: Swarm, trio: list[DaemonProcess]
) -> None:
    with Fleet(trio[:2], normal(2, 2 * SPAN_VALUES), codec="int8") as fleet:
        trainer = swarm.script(TRAINER, str(trio[BROKEN].home))
        eventually(lambda: trainer.output, "the trainer to encode")
        (memory,) = mapped(trainer.pid)
        assert holders(memory) == {trainer.pid, trio[BROKEN].pid}
        fleet.check(dict(enumerate(one_round(fleet))), 0.010)

        trainer.kill()

        eventually(lambda: trio[BROKEN].json("status")["runs"] == [], "the end of its run")
        eventually(lambda: not holders(memory), "the end of its memory")
        assert not list(Path("/dev/shm").glob("*equipoise*"))
        for run in fleet.runs:
            eventually(lambda run=run: run.state == Idle(peers=1), "all to know that it has left")
        fleet.check(dict(enumerate(one_round(fleet))), 0.010)
        with connect(trio[BROKEN].home) as client, client.join("fleet", {"w": torch.zeros(PART)}):
            assert len(trio[BROKEN].json("status")["runs"]) == 1


def test_a_daemon_killed_while_its_script_decodes_leaves_the_whole_mean(
    trio: list[DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = 1
    with Fleet(trio, normal(3, 3 * SPAN_VALUES), codec="int8") as fleet:
        decode, spans = Encoder._decode_span, []

        def decode_and_kill(encoder: Encoder, *args: Any) -> None:
            decode(encoder, *args)
            if encoder is fleet.runs[victim].core.binding.averages:
                spans.append(args)
                if len(spans) == 2:
                    trio[victim].kill()

        with monkeypatch.context() as killing:
            killing.setattr(Encoder, "_decode_span", decode_and_kill)
            outcomes: list[Outcome] = []
            while not spans:  # On busy cores a group may close without the victim.
                outcomes = one_round(fleet)
        assert len(spans) == 3
        assert not trio[victim].running
        ok = {member: outcome for member, outcome in enumerate(outcomes) if outcome.ok}
        assert victim in ok
        fleet.check(ok, 0.010)
        eventually(lambda: fleet.clients[victim].lost, "the loss")
        assert not fleet.runs[victim].average(timeout=0.2)
        assert fleet.error(victim, ok[victim]) <= 0.010

        trio[victim].start()
        for run in fleet.runs:
            eventually(lambda run=run: run.state == Idle(peers=2), "all to know each other")
        fleet.check(dict(enumerate(whole_round(fleet))), 0.010)
