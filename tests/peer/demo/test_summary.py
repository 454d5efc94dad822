"""The demo says that it worked only if it did, and why not otherwise."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import (
    BARS,
    POINTS,
    Finished,
    Ledger,
    Report,
    Stepped,
    Summary,
    is_point,
    line,
    summary_lines,
    write_plot,
)
from equipoise.peer.errors import EquipoiseError, FlagError

OPTIONS = DemoOptions(peers=3, rounds=2)


def stepped(update: int, **changes: Any) -> Stepped:
    values = {"counted": 3, "of": 3, "loss": 1.0, "bytes_sent": 100, "seconds": 0.5, "accuracy": 0.75}
    return msgspec.convert({"type": "Stepped", "update": update, **values, **changes}, Stepped)


def finished(digest: str = "d", accuracy: float = 0.96, alone: float = 0.92) -> Finished:
    return Finished(digest=digest, accuracy=accuracy, alone=(0.5, alone))


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
        ({"plot": "a.pdf"}, r"--plot: .* ends in .png or .svg, got 'a.pdf'"),
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
    assert (options.outer, options.codec) == ("average", "int8")
    assert options.federated
    assert not DemoOptions().check().federated


def test_missing_data_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EquipoiseError, match=r"pip install 'equipoise\[demo\]'"):
        DemoOptions().check()


def test_the_summary_begins_with_its_point_and_a_picture() -> None:
    told = list(summary_lines(summarize({0: GOOD, 1: GOOD, 2: GOOD})))
    assert told[0] == "96.0 % together, 92.0 % alone, equal bit for bit on 3 of 3"
    assert told[1] == f"\ntogether  {BARS[4]}{BARS[6]}  test accuracy by round"
    assert told[2].startswith(f"alone     {BARS[0]}{BARS[6]}  ")
    assert told[-1] == "It worked."


def test_the_summary_names_what_did_not_work_and_shows_no_zeros_that_nobody_measured() -> None:
    told = list(summary_lines(summarize({0: [stepped(1)], 1: [], 2: []})))
    assert told[-4:] == [
        "It did not work:",
        "  trainer 1 made 1 of 2 updates",
        "  trainer 2 made 0 of 2 updates",
        "  trainer 3 made 0 of 2 updates",
    ]
    assert not any("%" in one for one in told)


def test_updates_that_are_equal_bit_for_bit_are_no_failure_however_long_they_take() -> None:
    summary = ledger_of({0: GOOD, 1: GOOD, 2: GOOD}).summarize(frozenset(), [], 1e6)
    assert summary.ok
    assert (summary.equal, summary.bit_identical) == (3, True)


@pytest.mark.parametrize(
    ("update", "strategy", "expected"),
    [
        ({}, "allreduce", "round 1  accuracy 75.0 %  loss 1.000  3 of 3 peers  100 bytes sent in 0.50 s"),
        (
            {"of": 4},
            "federated",
            "round 1  accuracy 75.0 %  loss 1.000  3 of 4 drawn peers  100 bytes sent in 0.50 s",
        ),
        ({"counted": 0, "of": 0}, "gossip", "round 1  accuracy 75.0 %  loss 1.000  local steps"),
    ],
)
def test_a_line_tells_what_an_update_brought(update: dict[str, int], strategy: str, expected: str) -> None:
    options = DemoOptions(strategy=strategy, outer="average" if strategy == "federated" else "")
    assert line(stepped(1, **update), options) == expected


@pytest.mark.parametrize("rounds", [1, 2, 49, 50, 51, 99, 10_000])
def test_a_curve_fits_into_a_line_and_shows_the_end(rounds: int) -> None:
    points = [update for update in range(1, rounds + 1) if is_point(update, rounds)]
    assert len(points) <= POINTS + 1
    assert points[-1] == rounds


@pytest.mark.parametrize("name", ["accuracy.svg", "accuracy.png"])
def test_the_plot_is_written(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    told = write_plot(summarize({0: GOOD, 1: GOOD, 2: GOOD}), DemoOptions(plot=str(path)))
    assert told == f"accuracy by round: {path}"
    assert (b"<svg" if name.endswith("svg") else b"PNG") in path.read_bytes()[:1000]


def test_a_plot_that_cannot_be_drawn_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    path, summary = tmp_path / "missing" / "accuracy.svg", summarize({0: GOOD})
    pytest.importorskip("matplotlib")
    told = write_plot(summary, DemoOptions(plot=str(path)))
    assert told == f"no plot: cannot write {path}: No such file or directory"
    monkeypatch.setattr(importlib, "import_module", missing)
    told = write_plot(summary, DemoOptions(plot=str(path)))
    assert told == "no plot: matplotlib is missing; install it: pip install 'equipoise[demo]'"
