"""Populations of real daemons: one table for all, copies bit for bit, and members that die."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from e2e.learners import daemons
from e2e.swarm import DaemonProcess, Swarm, eventually
from e2e.threads import begin, settle, together
from equipoise.averaging.outcome import SHOWN_CHARS
from equipoise.averaging.population import Scored
from equipoise.averaging.state import StateId
from equipoise.peer import Client, Refused, connect
from equipoise.peer.demo.trainer import split_digits
from equipoise.peer.training import Log, Population, population

PEERS = 3
SPACE = {"lr": Log(1e-3, 1e-1)}

LR = 1e-30
"""Moves no weight; a rate of 0 would be that of a probe."""


class Loop:
    """A script whose weights are its score, and stay what they are but for copies."""

    def __init__(self, client: Client, name: str, score: float, size: int = 10) -> None:
        self.model = torch.nn.Linear(size, 1, bias=False)
        torch.nn.init.constant_(self.model.weight, score)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=LR)
        self.client, self.run = client, client.join(name, self.model)
        self.member = Population(self.run, SPACE)
        self.pause = threading.Event()

    @property
    def score(self) -> float:
        return float(self.model.weight.detach().mean())

    def step(self) -> bool:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, self.score)
        self.adam.step()
        self.pause.wait(0.02)  # What a step of a larger model takes.
        return self.member.report(self.score)


@contextlib.contextmanager
def loops(places: list[DaemonProcess], name: str, size: int = 10) -> Iterator[list[Loop]]:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(place.home)) for place in places]
        yield [Loop(client, name, index + 1.0, size) for index, client in enumerate(clients)]


def test_members_have_one_table_and_the_worst_copies_the_best(places: list[DaemonProcess]) -> None:
    with loops(places, "three") as found:
        worst = found[0]
        over = threading.Event()
        beside = [begin(spin, loop, over) for loop in found[1:]]
        before = dict(worst.member.values)
        eventually(worst.step, "a copy")
        eventually(lambda: have_met(found), "a round of each member, and one of several")
        over.set()
        settle(beside, 60)
        parent = worst.member.lineage[-1]
        image = worst.member._state().image(StateId(worst.member.steps, population.NO_LINEAGE))
        assert population._digest(image) == parent.state.lineage, "bit for bit, with optimizer state"
        assert parent in [table[0] for table in worst.member.tables], (
            "the best of a round, which may have had two members"
        )
        [source] = [loop for loop in found if loop.run.peer == parent.peer]
        assert parent.score in (2.0, 3.0)
        assert torch.equal(worst.model.weight, torch.full_like(worst.model.weight, parent.score))
        moments = worst.adam.state[worst.model.weight]
        assert float(moments["step"]) == worst.member.steps == parent.state.epoch
        assert moments["exp_avg"].mean() == pytest.approx(
            parent.score * (1 - 0.9**worst.member.steps), rel=1e-4
        )
        assert source.adam.state[source.model.weight]["exp_avg"].data_ptr() != moments["exp_avg"].data_ptr()
        assert worst.adam.param_groups[0]["lr"] == LR, "the script's own"
        rates = [parent.values["lr"] * factor for factor in (0.8, 1.2)]
        assert worst.member["lr"] in [pytest.approx(rate) for rate in rates]
        assert worst.member.values != before
        _have_one_table(found)
        told = f"copied from ..{parent.peer[-SHOWN_CHARS:]} at step {parent.state.epoch}"
        eventually(lambda: told in _line(worst), "its lineage in status")
        assert f"score {parent.score:g}, lr=" in _line(worst)


def test_members_with_another_space_are_refused_and_named(places: list[DaemonProcess]) -> None:
    with loops(places[:1], "spaces") as (loop,), connect(places[1].home) as client:
        loop.step()
        model = torch.nn.Linear(10, 1, bias=False)
        with client.join("spaces", model) as run:
            eventually(lambda: len(run.members) == 2, "the other")
            with pytest.raises(
                Refused, match=r"here 'lr: Log\(1e-05, 0.1\)' .* there 'lr: Log\(0.001, 0.1\)'"
            ):
                Population(run, {"lr": Log(1e-5, 1e-1)})
            Population(run, SPACE).finish()
        with pytest.raises(Refused, match="is stepped by Population already"):
            Population(loop.run, SPACE)


def test_a_member_whose_parent_dies_in_mid_copy_keeps_its_own_weights(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places = daemons(swarm, 2)
    monkeypatch.setattr(population, "PART_BYTES", 10_000)
    monkeypatch.setattr(population, "SILENT_SECONDS", 1.0)
    take = population.Exchange._take

    def killing(self: population.Exchange, own: population.Copy, *rest: object) -> None:
        take(self, own, *rest)  # type: ignore[arg-type]
        if places[1].running and self.run.peer == child.run.peer:
            places[1].kill()

    with loops(places, "mid-copy", 20_000) as (child, parent):
        monkeypatch.setattr(population.Exchange, "_take", killing)
        over = threading.Event()
        beside = begin(spin, parent, over)
        with caplog.at_level(logging.WARNING):
            eventually(lambda: child.step() or "keeps its own weights" in caplog.text, "the end of the copy")
        over.set()
        settle([beside], 60)
        assert not places[1].running
        assert "is silent" in caplog.text
        assert torch.equal(child.model.weight, torch.ones_like(child.model.weight))
        assert (child.member.lineage, child.member._exchange.whole) == ((), None)
        steps = child.member.steps
        assert not child.step()
        assert child.member.steps == steps + 1, "it goes on"


DECADES, SIX, STEPS, BATCH = 4, 6, 2000, 32


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices are faster so, with as many scripts as there are members."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rate_of(place: int, of: int) -> float:
    """Rates from 1e-4 to 1, evenly over the decades."""
    return float(10.0 ** (-DECADES + DECADES * place / (of - 1)))


class Student:
    """Learns digits with plain SGD; the score is the accuracy on images that it does not learn."""

    def __init__(self, seed: int) -> None:
        self.own, self.tests = split_digits()
        self.chance = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = torch.nn.Sequential(
                torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
            )
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, rate: float) -> None:
        self.sgd.param_groups[0]["lr"] = rate
        pixels, labels = self.own.pick(torch.randint(len(self.own.labels), (BATCH,), generator=self.chance))
        self.sgd.zero_grad()
        torch.nn.functional.cross_entropy(self.model(pixels), labels).backward()
        self.sgd.step()

    @torch.no_grad()
    def accuracy(self) -> float:
        return float((self.model(self.tests.pixels).argmax(1) == self.tests.labels).float().mean())


def fixed(rate: float) -> float:
    student = Student(0)
    for _ in range(STEPS):
        student.step(rate)
    return student.accuracy()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("one_thread")
def test_six_members_learn_digits_as_well_as_with_the_best_fixed_rate_and_two_die(swarm: Swarm) -> None:
    places = daemons(swarm, SIX)
    together_from, copies, ends = threading.Barrier(SIX), [0] * SIX, dict[int, float]()
    pause = threading.Event()

    def learn(index: int) -> None:
        student = Student(index)
        with connect(places[index].home) as peer, peer.join("digits", student.model) as run:
            member = Population(run, {"lr": Log(1e-4, 1.0)})
            member.values = {"lr": rate_of(index, SIX)}
            run.wait_for(SIX - 1)
            together_from.wait(60.0)
            for step in range(STEPS):
                student.step(member["lr"])
                pause.wait(0.005)
                if step % 25 == 24 and member.report(student.accuracy()):
                    image = member._state().image(StateId(member.steps, population.NO_LINEAGE))
                    assert population._digest(image) == member.lineage[-1].state.lineage
                    copies[index] += 1
                if index in victims and step == victims[index]:
                    places[index].kill()
                    return
            ends[index] = student.accuracy()
            tables[index] = list(member.tables)

    victims, tables = {0: STEPS // 4, 4: STEPS // 2}, dict[int, list[tuple[Scored, ...]]]()
    together(learn, range(SIX))
    best_fixed = max(fixed(rate_of(place, 5)) for place in range(5))
    best, mean = max(ends.values()), sum(ends.values()) / len(ends)
    rates = sorted(one.values["lr"] for one in tables[1][-1])
    rounds = max(len(one) for one in tables.values())
    print(f"best of population {best:.4f}, mean {mean:.4f}, best fixed rate {best_fixed:.4f}", end="; ")
    print(f"{rounds} rounds, {sum(copies)} copies with true digests, last rates {rates}")
    assert set(ends) == set(range(SIX)) - victims.keys()
    assert best >= best_fixed - 0.01
    assert mean >= best_fixed - 0.03
    assert sum(copies) >= SIX


def spin(loop: Loop, over: threading.Event) -> None:
    while not over.is_set():
        loop.step()


def have_met(found: list[Loop]) -> bool:
    """Whether each member has been in a round, and some have been in one round."""
    rounds = [{_rows(table) for table in list(loop.member.tables)} for loop in found]
    return all(rounds) and len(set.union(*rounds)) < sum(map(len, rounds))


def _have_one_table(found: list[Loop]) -> None:
    by_rows: dict[tuple[str, ...], tuple[Scored, ...]] = {}
    for loop in found:
        for table in loop.member.tables:
            assert by_rows.setdefault(_rows(table), table) == table


def _rows(table: tuple[Scored, ...]) -> tuple[str, ...]:
    return tuple(sorted(one.state.lineage + one.peer for one in table))


def _line(loop: Loop) -> str:
    runs = {one.name: one for one in loop.client.status().runs}
    return runs[loop.run.name].told.get("training", "")
