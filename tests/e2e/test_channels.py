"""Messages between the scripts of real daemons: what is kept, told and refused, and what survives whose death."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch

from e2e.learners import daemons
from e2e.swarm import DaemonProcess, Swarm, eventually
from equipoise.averaging.messaging.messages import MAX_WAITING
from equipoise.compression import CodecError
from equipoise.peer import Client, Delivery, Lost, Refused, Run, Undecided, connect
from equipoise.peer.client.safetensors_io import DTYPES

PEERS = 3
SOON = 60.0


def joined(clients: list[Client], name: str) -> list[Run]:
    runs = [client.join(name, [torch.zeros(300)]) for client in clients]
    eventually(lambda: all(len(run.members) == len(runs) for run in runs), "all peers of the run")
    return runs


@contextlib.contextmanager
def connected(places: list[DaemonProcess]):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(place.home)) for place in places]


def test_tensors_of_every_dtype_and_fields_arrive_as_they_were(places: list[DaemonProcess]) -> None:
    with connected(places[:2]) as clients:
        one, other = joined(clients, "dtypes")
        tensors = {
            name: torch.randint(0, 2, (3, 5)).to(torch.float32).to(dtype) for name, dtype in DTYPES.items()
        }
        tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(7), "strided": torch.arange(9.0)[::2]}
        fields = {"text": "é", "numbers": [1, 2.5, None, True], "nested": {"a": {}}}
        delivered = one.send(other.peer, "data", tensors, **fields).result(SOON)
        assert delivered.peer == other.peer
        message = other.receive("data", SOON)
        assert message is not None
        assert (message.sender, message.topic, message.fields) == (one.peer, "data", fields)
        assert message.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            got = message.tensors[name]
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert bytes(got.contiguous().view(-1).view(torch.uint8).tolist()) == bytes(
                tensor.contiguous().view(-1).view(torch.uint8).tolist()
            )


def test_large_tensors_travel_by_a_codec_or_exactly_and_memory_serves_again(
    places: list[DaemonProcess],
) -> None:
    with connected(places[:2]) as clients:
        one, other = joined(clients, "large")
        values = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1))
        for turn in range(4):
            for codec, error in (("raw", 0.0), ("fp16", 1e-3), ("int8", 2e-2)):
                sent = one.send(other.peer, "x", {"x": values + turn, "i": torch.arange(5)}, codec=codec)
                message = other.receive("x", SOON)
                assert message is not None
                sent.result(SOON)
                assert float((message.tensors["x"] - (values + turn)).norm() / values.norm()) <= error
                assert torch.equal(message.tensors["i"], torch.arange(5))
        half = one.send(other.peer, "x", {"x": values.to(torch.bfloat16)}, codec="int8")
        message = other.receive("x", SOON)
        assert message is not None
        assert message.tensors["x"].dtype == torch.bfloat16
        half.result(SOON)


def test_topics_keep_their_order_and_a_receiver_that_does_not_read_pushes_back(
    places: list[DaemonProcess],
) -> None:
    with connected(places) as clients:
        one, other, third = joined(clients, "full")
        sent = [one.send(other.peer, f"topic{index % 2}", index=index) for index in range(MAX_WAITING)]
        for delivery in sent:
            delivery.result(SOON)
        sent += [one.send(other.peer, f"topic{index % 2}", index=index) for index in range(MAX_WAITING, 200)]
        with pytest.raises(Undecided, match="is not acknowledged after"):
            sent[MAX_WAITING].result(0.2)
        with pytest.raises(Refused, match="wait for room"):
            sent[-1].result(SOON)
        beside = third.send(other.peer, "topic0", index=-1)
        assert other.receive("other", 0.05) is None
        got: dict[str, list[int]] = {"topic0": [], "topic1": []}
        while (message := other.receive("topic1", 1.0)) is not None:
            got["topic1"].append(message.fields["index"])
        while (message := other.receive("topic0", 1.0)) is not None:
            got["topic0"].append(message.fields["index"])
        while (message := other.receive("topic1", 1.0)) is not None:
            got["topic1"].append(message.fields["index"])
        beside.result(SOON)
        accepted = [index for index, delivery in enumerate(sent) if delivery.ended.exception() is None]
        assert accepted == list(range(2 * MAX_WAITING))
        assert got["topic1"] == [index for index in accepted if index % 2]
        assert [index for index in got["topic0"] if index >= 0] == [
            index for index in accepted if not index % 2
        ]
        assert got["topic0"].count(-1) == 1


def test_what_cannot_be_sent_is_refused_with_a_reason(places: list[DaemonProcess]) -> None:
    with connected(places[:2]) as clients:
        one, other = joined(clients, "refused")
        with pytest.raises(Refused, match="no such peer is in the run with equal terms"):
            one.send("12D3KooWNobody", "x").result(SOON)
        with pytest.raises(Refused, match="expected another peer as the receiver"):
            one.send(one.peer, "x").result(SOON)
        with pytest.raises(ValueError, match="expected a topic of at most 64 characters"):
            one.send(other.peer, "x" * 65)
        with pytest.raises(ValueError, match="expected fields of text, numbers, lists and dicts"):
            one.send(other.peer, "x", field=object())
        with pytest.raises(CodecError, match="unknown codec 'int9'"):
            one.send(other.peer, "x", {"x": torch.ones(3)}, codec="int9")
        with pytest.raises(CodecError, match="leaves most values out"):
            one.send(other.peer, "x", {"x": torch.ones(3)}, codec="sparse")
        with pytest.raises(ValueError, match="expected dense values"):
            one.send(other.peer, "x", {"x": torch.eye(3).to_sparse()})
        differs = places[2]
        with connect(differs.home) as client, client.join("refused", [torch.zeros(301)]) as third:
            assert third.peer not in one.members
            with pytest.raises(Refused, match="no such peer is in the run with equal terms"):
                one.send(third.peer, "x").result(SOON)


def test_a_script_that_leaves_or_starts_again_is_told_of(places: list[DaemonProcess]) -> None:
    with connected(places[:2]) as clients:
        one, other = joined(clients, "again")
        before = one.send(other.peer, "x", number=1).result(SOON)
        unread = [one.send(other.peer, "x") for _ in range(MAX_WAITING - 1)]
        for delivery in unread:
            delivery.result(SOON)
        waiting = [one.send(other.peer, "x") for _ in range(MAX_WAITING)]
        other.leave()
        for delivery in waiting:
            with pytest.raises((Lost, Refused), match=r"its client has left the run|no such peer"):
                delivery.result(SOON)
        again = clients[1].join("again", [torch.zeros(300)])
        eventually(lambda: again.wait_for(1, 1.0) and len(one.members) == 2, "both again")
        after = one.send(again.peer, "x", number=2).result(SOON)
        assert after.script != before.script
        message = again.receive("x", SOON)
        assert message is not None
        assert message.fields == {"number": 2}
        pending = one.send(again.peer, "y")
        one.leave()
        if not pending.done() or pending.ended.exception() is not None:
            with pytest.raises(Lost, match="this script has left the run"):
                pending.result(SOON)
        with pytest.raises(Refused):
            one.receive("x", 1.0)


def test_messages_survive_both_daemons(swarm: Swarm) -> None:
    places = daemons(swarm, 2)
    with connected(places) as clients:
        one, other = joined(clients, "survives")
        large = torch.randn(100_000)
        sent = [one.send(other.peer, "x", {"x": large + index}, index=index) for index in range(20)]
        for delivery in sent:
            delivery.result(SOON)
        first = [other.receive("x", SOON) for _ in range(5)]
        places[1].kill()
        sent += [one.send(other.peer, "x", {"x": large + index}, index=index) for index in range(20, 30)]
        places[1].start()
        eventually(lambda: not clients[1].lost, "the receiver's new daemon")
        second = [other.receive("x", SOON) for _ in range(5)]
        places[0].kill()
        places[0].start()
        rest = [other.receive("x", SOON) for _ in range(20)]
        for delivery in sent:
            delivery.result(SOON)
        got = [message for message in (*first, *second, *rest) if message is not None]
        assert [message.fields["index"] for message in got] == list(range(30))
        assert all(torch.equal(one.tensors["x"], large + one.fields["index"]) for one in got)
        assert other.receive("x", 1.0) is None


@pytest.mark.slow
def test_a_receiver_that_is_gone_for_good_loses_messages_with_a_word(swarm: Swarm) -> None:
    places = daemons(swarm, 2)
    with connected(places) as clients:
        one, other = joined(clients, "gone")
        one.send(other.peer, "x").result(SOON)
        places[1].kill()
        with pytest.raises(Lost, match="not acknowledged for"):
            one.send(other.peer, "x").result(60)


def test_elastic_averaging_of_contributing_brings_peers_together(places: list[DaemonProcess]) -> None:
    text = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
    (block,) = (one for one in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "Elastic" in one)
    names: dict[str, Any] = {}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    with connected(places) as clients:
        models = [{"w": torch.full((300,), float(index))} for index in range(PEERS)]
        runs = [client.join("elastic", model) for client, model in zip(clients, models, strict=True)]
        together = threading.Barrier(PEERS)

        def train(index: int) -> float:
            model, run = models[index], runs[index]
            elastic = names["Elastic"](run, model, peers=PEERS)
            model["w"] += index - 1  # Apart again, by 0 in the mean.
            for _ in range(30):
                together.wait(SOON)
                elastic.exchange()
            return float(model["w"].mean())

        with ThreadPoolExecutor(PEERS) as pool:
            ends = list(pool.map(train, range(PEERS)))
        assert max(ends) - min(ends) < 0.1
        assert all(end == pytest.approx(1.0, abs=0.2) for end in ends)


class Feeder:
    """A script that sends numbered messages of 0 to 4 MB to the others, and reads all that comes."""

    def __init__(self, run: Run, others: list[str], count: int, seed: int) -> None:
        self.run, self.others, self.count, self.chance = run, others, count, Random(seed)
        self.sent: list[tuple[str, int, Delivery]] = []
        self.got: defaultdict[str, list[int]] = defaultdict(list)
        self.data = torch.arange(1_000_000, dtype=torch.float32)
        self.over = threading.Event()

    def send(self) -> None:
        for number in range(self.count):
            size = self.chance.choice((0, 10, 1000, 100_000, self.chance.randint(0, 1_000_000)))
            to = self.chance.choice(self.others)
            delivery = self.run.send(to, f"t{number % 2}", {"x": self.data[:size]}, n=number, size=size)
            self.sent.append((to, number, delivery))
            if number >= 12:
                with contextlib.suppress(Lost, Refused):
                    self.sent[number - 12][2].result()

    def read(self, topic: str) -> None:
        while not self.over.is_set():
            with contextlib.suppress(Lost, ConnectionError, Refused):
                message = self.run.receive(topic, 1.0)
                if message is not None:
                    tensor, size = message.tensors["x"], message.fields["size"]
                    assert tensor.numel() == size
                    assert size == 0 or float(tensor[-1]) == size - 1
                    self.got[f"{message.sender}/{topic}"].append(message.fields["n"])


def settled(feeders: list[Feeder]) -> tuple[set[tuple[str, str, int]], int]:
    """The messages that were acknowledged, by sender, receiver and number, and how many were not."""
    acknowledged, lost = set(), 0
    for one in feeders:
        for to, number, delivery in one.sent:
            try:
                delivery.result(60)
                acknowledged.add((one.run.peer, to, number))
            except (Lost, Refused):
                lost += 1
    return acknowledged, lost


def read_by(feeders: list[Feeder]) -> set[tuple[str, str, int]]:
    return {
        (source.split("/")[0], one.run.peer, number)
        for one in feeders
        for source, numbers in list(one.got.items())
        for number in list(numbers)
    }


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", [2500])
def test_ten_thousand_messages_while_daemons_are_killed(swarm: Swarm, count: int) -> None:
    places = daemons(swarm, 4)
    chance = Random(7)
    with connected(places) as clients:
        runs = joined(clients, "storm")
        ids = [run.peer for run in runs]
        feeders = [
            Feeder(run, [one for one in ids if one != run.peer], count, seed) for seed, run in enumerate(runs)
        ]
        readers = [
            threading.Thread(target=one.read, args=[topic], daemon=True)
            for one in feeders
            for topic in ("t0", "t1")
        ]
        senders = [threading.Thread(target=one.send, daemon=True) for one in feeders]
        began, kills = time.monotonic(), 0
        for thread in (*readers, *senders):
            thread.start()
        while any(thread.is_alive() for thread in senders):
            victim = chance.randrange(4)
            places[victim].kill()
            kills += 1
            places[victim].start()
            eventually(lambda victim=victim: not clients[victim].lost, "the daemon's script", SOON)
            before = sum(len(one.sent) for one in feeders)
            eventually(
                lambda before=before: (
                    sum(len(one.sent) for one in feeders) > before + 250
                    or not any(thread.is_alive() for thread in senders)
                ),
                "more messages",
                300,
            )
        acknowledged, lost = settled(feeders)
        eventually(lambda: acknowledged <= read_by(feeders), "all that was acknowledged", 60)
        for one in feeders:
            one.over.set()
        for thread in readers:
            thread.join()
        for one in feeders:
            for sender, numbers in one.got.items():
                assert numbers == sorted(set(numbers)), f"{sender}: twice, or out of order"
        total = len(acknowledged)
        print(f"{total} acknowledged and read, {lost} told lost, {kills} daemons killed", end=", ")
        print(f"{time.monotonic() - began:.0f} s")
        assert total + lost == 4 * count


@pytest.mark.slow
def test_memory_stays_bounded_with_a_receiver_that_never_reads(swarm: Swarm) -> None:
    places = daemons(swarm, 2)
    with connected(places) as clients:
        one, other = joined(clients, "never")
        one.send(other.peer, "x", {"x": torch.zeros(1000)}).result(SOON)
        before = [psutil.Process(place.pid).memory_info().rss for place in places]
        sent = [one.send(other.peer, "x", {"x": torch.ones(4_000_000)}) for _ in range(200)]
        eventually(lambda: sum(delivery.done() for delivery in sent) >= 184, "what is decided")
        grown = [
            psutil.Process(place.pid).memory_info().rss - was
            for place, was in zip(places, before, strict=True)
        ]
        told = sum(delivery.done() and delivery.ended.exception() is None for delivery in sent)
        print(
            f"{told} acknowledged; the daemons grew by {grown[0] / 2**20:.0f} and {grown[1] / 2**20:.0f} MiB"
        )
        assert told == 16
        assert grown[1] <= 288 * 2**20
        assert grown[0] <= 544 * 2**20
