"""The demo says that it worked only if it did, and why not otherwise."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from equipoise.peer.demo.display import PlainLines, render_summary
from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import Finished, Ledger, Report, Stepped, Summary
from equipoise.peer.errors import EquipoiseError, FlagError

OPTIONS = DemoOptions(peers=3, rounds=2)


def stepped(update: int, **changes: float) -> Stepped:
    values = {
        "group": 3,
        "contributors": 3,
        "loss": 1.0,
        "bytes_sent": 100,
        "bytes_saved": 290,
        "seconds": 0.5,
    }
    return msgspec.convert({"type": "Stepped", "update": update, **values, **changes}, Stepped)


def finished(digest: str = "d", accuracy: float = 0.96, alone: float = 0.92) -> Finished:
    return Finished(digest=digest, accuracy=accuracy, alone=alone)


def ledger_of(reports: dict[int, list[Report]], options: DemoOptions = OPTIONS) -> Ledger:
    ledger = Ledger(options)
    for trainer, said in reports.items():
        for report in said:
            ledger.add(trainer, report)
    return ledger


def summarize(
    reports: dict[int, list[Report]], options: DemoOptions = OPTIONS, killed: frozenset[int] = frozenset()
) -> Summary:
    return ledger_of(reports, options).summarize(killed, [], 10.0)


GOOD: list[Report] = [stepped(1), stepped(2), finished()]


def test_it_worked() -> None:
    summary = summarize({0: GOOD, 1: GOOD, 2: GOOD})
    assert summary.ok
    assert summary.rounds == 2
    assert summary.bit_identical
    assert summary.accuracy == pytest.approx(0.96)


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ([stepped(1)], "trainer 3 made 1 of 2 updates"),
        ([stepped(1), stepped(2), finished(digest="e")], "parameters differ"),
        ([stepped(1), stepped(2), finished(accuracy=0.80)], "points above a peer alone"),
    ],
)
def test_it_did_not_work(last: list[Report], problem: str) -> None:
    summary = summarize({0: GOOD, 1: GOOD, 2: last})
    assert not summary.ok
    assert problem in " ".join(summary.problems)


def test_a_trainer_that_finished_has_made_all_updates_though_it_missed_a_round() -> None:
    summary = summarize({0: GOOD, 1: GOOD, 2: [stepped(1), finished()]})
    assert summary.ok
    assert summary.rounds == 2


def test_a_problem_from_outside_counts() -> None:
    summary = ledger_of({0: GOOD, 1: GOOD, 2: GOOD}).summarize(frozenset(), ["daemon 2 ended"], 1.0)
    assert not summary.ok


def test_the_killed_need_not_finish_but_must_have_been_killed() -> None:
    options = DemoOptions(peers=3, rounds=2, kill=1)
    reports: dict[int, list[Report]] = {0: [stepped(1)], 1: GOOD, 2: GOOD}
    assert summarize(reports, options, frozenset({0})).ok
    assert not summarize({**reports, 0: GOOD}, options).ok


def test_bytes_are_those_of_all_trainers_in_all_rounds() -> None:
    summary = summarize({0: GOOD, 1: GOOD, 2: GOOD})
    assert summary.bytes_sent == 600
    assert summary.bytes_saved == 1740


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": 1}, "--peers from 2 to 16, got 1"),
        ({"rounds": 0}, "--rounds from 1"),
        ({"kill": 3}, "--kill from 0 to 2"),
        ({"kill": -1}, "--kill from 0 to 2"),
        ({"strategy": "telepathy"}, "--strategy: unknown strategy 'telepathy'"),
        ({"codec": "int9"}, "int9"),
        ({"rule": "medium"}, "--rule: unknown rule 'medium'.*did you mean 'median'"),
        ({"strategy": "federated", "outer": "fedyogi:eta=x"}, "--outer: .*fedyogi"),
        ({"outer": "fedyogi"}, "--outer needs --strategy federated, got allreduce"),
        ({"plot": "a.svg"}, "--plot needs --strategy federated, got allreduce"),
        ({"strategy": "federated", "plot": "a.pdf"}, r"--plot: .* ends in .png or .svg, got 'a.pdf'"),
        ({"split": "classes:each=11"}, "--split: .* at most 10 for each peer"),
        ({"strategy": "federated:available=5"}, "--strategy: expected available of at most 4 peers, got 5"),
        ({"strategy": "federated:tags=gpu"}, "--strategy: the demo's daemons carry no tags"),
        ({"strategy": "federated:quorum=4", "kill": 1}, "expected quorum of at most 3 peers, got 4"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        msgspec.convert(options, DemoOptions).check()


def test_federated_options_name_their_defaults() -> None:
    options = DemoOptions(strategy="federated").check()
    assert (options.outer, options.plot, options.codec) == ("average", "equipoise-demo.svg", "int8")
    assert options.federated
    assert not DemoOptions().check().federated


def test_missing_data_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EquipoiseError, match=r"pip install 'equipoise\[demo\]'"):
        DemoOptions().check()


def test_the_summary_reads_well() -> None:
    text = printed(render_summary(summarize({0: GOOD, 1: GOOD, 2: GOOD}), OPTIONS))
    assert "96.0 % in the swarm" in text
    assert "92.0 % alone" in text
    assert "bit-identical on 3 of 3 peers" in text
    assert "It worked." in text


def test_the_summary_names_what_did_not_work() -> None:
    text = printed(render_summary(summarize({0: GOOD, 1: GOOD}), OPTIONS))
    assert "It did not work:" in text
    assert "trainer 3 made 0 of 2 updates" in text
    assert "NOT bit-identical" in text


def test_plain_lines_show_a_round_once() -> None:
    console = Console(width=200)
    lines = PlainLines(console, OPTIONS)
    ledger = Ledger(OPTIONS)
    with console.capture() as capture:
        for trainer in range(3):
            if ledger.add(trainer, stepped(1)):
                lines.show(stepped(1))
    assert capture.get() == "round 1  group 3  contributors 3  loss 1.000  bytes 100 bytes  seconds 0.50\n"


def printed(renderable: object) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()
