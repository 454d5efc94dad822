"""What the command line prints, piped and on a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import json
import os
import pty
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from rich.console import Console

from equipoise.averaging.ledger import Given
from equipoise.averaging.outcome import Gathering, Outcome
from equipoise.dht.state import BootstrapStatus, DirectStatus, ReachStatus, SwarmStatus
from equipoise.peer.cli import output, program, verbs
from equipoise.peer.cli.output import (
    print_json,
    print_lines,
    print_peers,
    print_rounds,
    print_status,
    settings_lines,
)
from equipoise.peer.config import Setting
from equipoise.peer.errors import NoDaemon
from equipoise.peer.status import Exchanges, Kernels, PeerRow, RunStatus, Status

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
OTHER = "12D3KooWQNv4Kzx1MXpfjHUVvMnxwVKxC7xGxDzYzsQvJ9rjNG5a"
ADDRESS = f"/dns4/a-host-with-a-rather-long-name.example.org/tcp/31337/p2p/{PEER}"
REASON = (
    f"nobody listens at a-host-with-a-rather-long-name.example.org port 31337, where {PEER} was met before"
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is a terminal of 80x24."""
    monkeypatch.setattr(output, "_on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def a_status(runs: int = 2, entries: int = 1, warnings: int = 1) -> Status:
    row = RunStatus(
        name="digits",
        purpose="step",
        spec="00" * 32,
        codec="int8",
        group_size=16,
        values=1_000_000,
        state=Gathering(2, 4),
        reason=f"waits for two of four: {REASON}",
        round=12,
        rounds_ok=41,
        rounds_failed=2,
        accumulated=32.0,
        told={"training": "epoch 7 of 20"},
        drawn=(OTHER, PEER, *(f"12D3KooW{index:0>44}" for index in range(62))),
        contributed=(OTHER,),
    )
    return Status(
        name="gpu-box",
        peer_id=PEER,
        pid=4711,
        uptime=3661.0,
        memory=463_000_000,
        tasks=41,
        threads=7,
        files=60,
        clients=2,
        swarm=SwarmStatus(
            state="searching",
            reason=f"{REASON}; trying again",
            peer=PEER,
            addresses=(ADDRESS,) * 3,
            dialable=True,
            bootstrap=tuple(BootstrapStatus(ADDRESS, "refused", REASON, 3) for _ in range(entries)),
            connected=(),
            p2pd_pid=4712,
            p2pd_restarts=0,
            direct=DirectStatus(channel="aead"),
            reach=ReachStatus("direct", f"dialled by {OTHER}"),
            returning=tuple(BootstrapStatus(OTHER, "timeout", REASON, 3, 41.7) for _ in range(entries)),
        ),
        runs=tuple(msgspec.structs.replace(row, name=f"digits-{index}") for index in range(runs)),
        kernels=Kernels("numba", "it is installed"),
        versions={"equipoise": "0.1.0", "torch": "2.13"},
        settings=(Setting("join", (ADDRESS, ADDRESS), "file /home/me/config.toml"),),
        log="/home/me/daemon.log",
        warnings=tuple(
            f"this machine's clock is {index} h ahead; set it: {REASON}" for index in range(warnings)
        ),
    )


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


# ---- status ----


def test_status_begins_with_how_it_stands_and_what_to_put_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(a_status())

    first, warning, *_ = printed(capsys)
    assert first.startswith(
        "gpu-box: searching: nobody listens at a-host-with-a-rather-long-name.example.org"
    )
    assert warning.startswith("warning: this machine's clock is 0 h ahead; set it")


def test_nothing_is_folded_or_cut_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(a_status(runs=1))

    text = capsys.readouterr().out
    short = REASON.replace(PEER, f"..{PEER[-8:]}")
    assert "\nrun       state      round  ok        why\n" in text
    assert f"\ndigits-0  Gathering  12     41 of 43  waits for two of four: {short}\n" in text
    assert "connected      0 peers, 2 scripts\n" in text
    assert f"joins through  refused: {short}\n" in text
    assert f"met before     ..{OTHER[-8:]}, timeout: next attempt in 42 s: {short}\n" in text
    assert PEER not in text
    assert "…" not in text


def test_status_names_the_setting_that_is_better_than_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    status, advice = a_status(runs=1), "exchanges take 33% of the time, 5 s each; the links need 4.5 s"
    runs = tuple(msgspec.structs.replace(run, advice=advice) for run in status.runs)
    print_status(msgspec.structs.replace(status, runs=runs))
    assert f"digits-0  {advice}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("runs", "entries", "warnings"), [(0, 0, 0), (2, 1, 1), (64, 64, 9)])
def test_status_fits_a_screen(
    capsys: pytest.CaptureFixture[str], runs: int, entries: int, warnings: int
) -> None:
    print_status(a_status(runs, entries, warnings))

    lines = printed(capsys)
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    assert "gpu-box: searching" in lines[0]
    assert "equipoise status --all" in lines[-1]
    assert not any(PEER[-8:] in line and f"..{PEER[-8:]}" not in line for line in lines)


@pytest.mark.usefixtures("terminal")
def test_a_federated_run_says_who_is_drawn_and_who_is_in(capsys: pytest.CaptureFixture[str]) -> None:
    status = a_status(runs=1)
    names = tuple(f"12D3KooW{index:0>44}" for index in range(4))

    def told(drawn: tuple[str, ...], contributed: tuple[str, ...], everything: bool = False) -> str:
        run = msgspec.structs.replace(status.runs[0], drawn=drawn, contributed=contributed)
        print_status(msgspec.structs.replace(status, runs=(run,)), everything)
        found = [line for line in printed(capsys) if "drawn" in line or " in: " in line]
        return " ".join(found).removeprefix("digits-0").strip()

    assert told((OTHER, PEER), ()) == f"drawn: ..{OTHER[-8:]}, this one"
    assert told((OTHER, PEER), (OTHER,)) == f"drawn, not in: this one; in: ..{OTHER[-8:]}"
    assert told((OTHER, PEER), (PEER, OTHER)) == f"in: this one, ..{OTHER[-8:]}"
    assert told(names, ()) == "drawn: ..00000000, ..00000001, ..00000002 and 1 more"
    assert told(names, (), everything=True) == f"drawn: {', '.join(names)}"
    assert told((), ()) == ""


@pytest.mark.parametrize("columns", [None, 80])
def test_all_of_the_status_has_identifiers_whole(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, columns: int | None
) -> None:
    if columns:
        request.getfixturevalue("terminal")
    print_status(a_status(warnings=9), everything=True)

    text = capsys.readouterr().out
    for whole in (
        PEER,
        f"address         {ADDRESS}\n",
        f"met before      {OTHER} (timeout: next attempt in 42 s: {REASON})\n",
        f"{ADDRESS}, {ADDRESS} (file /home/me/config.toml)\n",
        "8 h ahead",
    ):
        assert whole in text.replace("\x1b[1m", "").replace("\x1b[0m", "")


@pytest.mark.parametrize(("spread", "told"), [(None, "unknown"), (0.123, "0.12")])
def test_a_gossip_run_shows_its_exchanges(
    capsys: pytest.CaptureFixture[str], spread: float | None, told: str
) -> None:
    status = a_status(runs=1)
    run = msgspec.structs.replace(status.runs[0], exchanges=Exchanges(3, 40, 2, 1, spread))
    print_status(msgspec.structs.replace(status, runs=(run,)))

    expected = f"3 partners; exchanges: 40 ok, 2 failed, 1 in doubt; spread {told}"
    assert expected in capsys.readouterr().out


def test_a_rate_is_shown_as_people_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    told = [Setting("relay_bandwidth", 12.5e6, "default"), Setting("upload", 0.0, "default")]
    print_lines(settings_lines(told))

    assert printed(capsys) == ["relay_bandwidth 12.5 MB/s (default)", "upload          no cap (default)"]


# ---- peers ----


def a_row(**fields: Any) -> PeerRow:
    row = PeerRow(
        "digits", OTHER, False, True, 7, False, 0.0, 0.0, True, "relayed", "its own word", name="box2"
    )
    return msgspec.structs.replace(row, **fields)


@pytest.mark.usefixtures("terminal")
def test_names_come_first_and_peer_ids_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    print_peers([a_row(), a_row(peer=PEER, me=True, name="gpu-box")])

    titles, other, me, *_ = printed(capsys)
    assert titles.split() == ["name", "peer", "run", "state", "round", "accumulated"]
    assert other.split() == ["box2", f"..{OTHER[-8:]}", "digits", "ready", "7", "0"]
    assert me.startswith(f"gpu-box (this one)  ..{PEER[-8:]}")


def test_each_peer_has_a_line_that_says_how_it_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    why = "relay ..abcdefgh: 1 MB passed in 0.08 s; not dialled: 1 of 1 peer failed, nobody answers at \x1b[31m44.0.0.1"
    print_peers([a_row(run="one", why=why), a_row(run="two", why=why)])

    [reached] = [line for line in printed(capsys) if "relayed:" in line]
    assert reached.startswith(f"box2 ..{OTHER[-8:]}")
    assert "nobody answers at" in reached
    assert "\x1b" not in reached


def test_a_peer_with_tags_has_one_line_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_peers(
        [a_row(run="one", tags=("a100", "gpu")), a_row(run="two", tags=("a100", "gpu")), a_row(peer=PEER)]
    )

    told = [line for line in printed(capsys) if "tags:" in line]
    assert told == [f"box2 ..{OTHER[-8:]} tags: a100, gpu"]


def test_a_peer_with_other_options_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    said = "target batch size: here 4096, there 2048"
    print_peers([a_row(run="digits/step", same_spec=False, differs=said)])

    text = capsys.readouterr().out
    assert "other options" in text
    assert f"digits/step: other options: {said}" in text


def test_no_peers_are_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    print_peers([])
    assert capsys.readouterr().out == "no peers: no script takes part in a run\n"


# ---- rounds ----


def test_rounds_have_times_and_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_100.0)
    monkeypatch.setitem(os.environ, "TZ", "UTC")
    time.tzset()
    group = (PEER, OTHER)
    alike = Outcome(
        ok=True, reason="all", run="a", round=1, group=group, contributors=dict.fromkeys(group, 32.0)
    )
    outcomes = [
        msgspec.structs.replace(alike, started=1_700_000_000.0),
        msgspec.structs.replace(
            alike, started=1_800_000_000.0, contributors={PEER: 1.0, OTHER: 2.5}, capped={OTHER: 1e12}
        ),
        Outcome(ok=False, reason=f"no group within 5 s: {REASON}", run="a", round=2),
    ]
    print_rounds(outcomes)

    _, first, second, third = printed(capsys)
    assert first.startswith("2023-11-14 22:13  a    1      ok, 2 of 2  32 each          0.000 s  all")
    assert second.startswith("08:00:00          a    1      ok, 2 of 2  1, 2.5 of 1e+12  0.000 s")
    assert third.endswith(REASON.replace(PEER, f"..{PEER[-8:]}"))


def test_a_member_that_only_attends_is_not_shown_as_a_contributor(capsys: pytest.CaptureFixture[str]) -> None:
    half = Outcome(
        ok=True, reason="1 of 2", run="a", group=(PEER, OTHER), contributors={PEER: 2.0**-30, OTHER: 32.0}
    )
    print_rounds([half, msgspec.structs.replace(half, contributors={PEER: 2.0**-30, OTHER: 2.0**-30})])

    _, first, second = printed(capsys)
    assert "  ok, 1 of 2  32 each  " in first
    assert "  ok, 0 of 2  " in second
    assert "e-10" not in first + second


def test_the_peer_that_a_round_waited_for_is_named_in_rounds_and_in_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits = {"matchmaking": (OTHER, 1.75), "exchange": (PEER, 4.5)}
    one = Outcome(ok=True, reason="all", run="a", metrics={"loss": 0.5}, waits=waits)
    print_rounds([one, msgspec.structs.replace(one, metrics={}, waits={})])
    _, first, second = printed(capsys)
    told = f"waited 1.75 s for ..{OTHER[-8:]} to join, waited 4.50 s for the values of "
    assert first.endswith(f"  loss 0.5; {told}..{PEER[-8:]}")
    assert second.endswith("  all")

    status = a_status(runs=1)
    run, given = msgspec.structs.replace(status.runs[0], last=one), Given(201, 91, 2e6, 0, {"late": 110})
    status = msgspec.structs.replace(status, runs=(run,), given={run.name: given})
    print_json(status)
    found = {"rounds": 201, "counted": 91, "samples": 2e6, "bytes": 0, "missed": {"late": 110}}
    assert json.loads(capsys.readouterr().out)["given"] == {run.name: found}
    print_status(status)
    shown = capsys.readouterr().out
    assert f"digits-0  {told}this peer\n" in shown
    assert "digits-0  contributed to 91 of 201 rounds, 2,000,000 samples; 110 missed: 110 late\n" in shown


def test_rounds_show_what_was_measured_where_anything_was(capsys: pytest.CaptureFixture[str]) -> None:
    many = {f"m{index}": index / 3 for index in range(6)}
    measured = Outcome(ok=True, reason="all", run="a", metrics={"loss": 0.31234567}, evaluation=many)
    late = Outcome(ok=False, reason="too late by 1.3 s: it was closed", run="a", late=1.3)
    print_rounds([measured, late])

    titles, first, second = printed(capsys)
    assert titles.endswith("  metrics or why")
    assert first.endswith("  loss 0.3123; before: m0 0, m1 0.3333, m2 0.6667, m3 1, 2 more")
    assert "  late  " in second
    assert second.endswith("too late by 1.3 s: it was closed")


def test_many_weights_are_shown_as_a_range_with_the_number_that_is_capped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = {PEER: 1.0, OTHER: 10.0, **{f"p{index}": 2.0 for index in range(9)}}
    print_rounds([Outcome(ok=True, reason="all", contributors=weights, capped={OTHER: 1e12})])

    assert "  1 to 10, 1 capped  " in printed(capsys)[1]


@pytest.mark.usefixtures("terminal")
def test_a_narrow_terminal_wraps_the_reason_and_folds_no_identifier(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_rounds(
        [Outcome(ok=False, reason=REASON.replace("a-host", "h"), run="digits", round=1234, started=1.7e9)]
    )

    lines = printed(capsys)
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("2023-11-14 22:13  digits  1234   failed           0.000 s  nobody")
    assert " ".join(" ".join(line[56:] for line in lines[1:]).split()).endswith(
        f"where ..{PEER[-8:]} was met before"
    )


def test_watch_renews_the_screen_until_q_and_waits_for_a_daemon_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master, slave = pty.openpty()
    asked: list[int] = []

    def ask() -> tuple[Status, Sequence[Outcome]]:
        asked.append(len(asked))
        if asked == [0]:
            raise NoDaemon("no daemon is running here")
        os.write(master, b"q")
        return a_status(), [Outcome(ok=True, reason="mean over 4 of 4 members", run="digits", round=3)]

    monkeypatch.setattr(verbs, "RENEW_SECONDS", 0.0)
    with os.fdopen(slave) as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        verbs.renew(ask)
    assert asked == [0, 1] or len(asked) == 3, "q is seen at the second look at the latest"

    console = Console(width=200)
    with console.capture() as captured:
        console.print(verbs.screen(ask))
    os.close(master)
    shown = captured.get()
    assert all(text in shown for text in ("gpu-box: searching", "digits-1", "mean over 4 of 4", "q leaves"))


def test_watch_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run(["watch"]) == 2
    assert "watch needs a terminal" in capsys.readouterr().err
