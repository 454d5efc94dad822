"""A member's exchange without peers: the table of a round, and copies of which every byte is proved, or none taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.population import Log, Scored, Uniform
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.peer.client.channels import Message
from equipoise.peer.training import population
from equipoise.peer.training.population import SILENT_SECONDS, Copy, Exchange, Note, _digest, _mark

ME, BEST = "me", "peer2"
SPACE = {"lr": Log(1e-4, 1.0), "drop": Uniform(0, 1)}
VALUES = {"lr": 0.1, "drop": 0.5}
IMAGE = torch.arange(250, dtype=torch.uint8)


class Run:
    """A run whose messages are kept, and of which none come by themselves."""

    name, peer = "fakes", ME

    def __init__(self) -> None:
        self.sent: list[tuple[str, Note, torch.Tensor | None]] = []
        self.now = 0.0
        channels = SimpleNamespace(receive=lambda topic, timeout: None, send=self._send)
        self.core = SimpleNamespace(channels=channels, clock=lambda: self.now)

    def _send(self, peer: str, topic: str, tensors: dict[str, torch.Tensor], codec: str, fields: Any) -> None:
        assert (topic, codec) == ("population", "raw")
        self.sent.append((peer, msgspec.convert(fields, Note), tensors.get("part")))


def row(peer: str, score: float, image: torch.Tensor = IMAGE) -> Scored:
    return Scored(peer, StateId(7, _digest(image)), score, VALUES)


def outcome(*rows: Scored, parents: dict[str, str] | None = None, ok: bool = True) -> Outcome:
    marks = {peer: {"parent": _mark(parent)} for peer, parent in (parents or {}).items()}
    return Outcome(
        ok=ok,
        reason="",
        group=tuple(one.peer for one in rows),
        contributors={one.peer: ATTENDANCE_LIMIT for one in rows},
        states={one.peer: one.state for one in rows},
        reports={one.peer: (one.values, {"score": one.score, **marks.get(one.peer, {})}) for one in rows},
        digest="00",
    )


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def exchange(run: Run) -> Exchange:
    return Exchange(run, SPACE, "truncation", limit=1000)  # type: ignore[arg-type]


def copying(exchange: Exchange, run: Run) -> Copy:
    """The worst of three members has asked the best for its weights."""
    exchange.ended(outcome(row(ME, 0.0), row("peer1", 1.0), row(BEST, 2.0)), 0.0)
    assert run.sent.pop() == (BEST, Note(_digest(IMAGE)), None)
    assert exchange._copy is not None
    return exchange._copy


def message(sender: str, part: Any = None, **fields: Any) -> Message:
    tensors = {} if part is None else {"part": part}
    return Message(sender, "population", tensors, {"digest": _digest(IMAGE), "size": len(IMAGE), **fields})


def test_a_member_sends_what_it_has_in_parts_and_says_what_it_has_not(
    exchange: Exchange, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(population, "PART_BYTES", 100)
    ancestors = (row("older", 0.5),)
    exchange._images[_digest(IMAGE)] = IMAGE, ancestors
    for offset, length in ((0, 100), (200, 50), (300, 0)):
        exchange.hear(message("asker", size=0, offset=offset), 0.0)
        to, note, part = run.sent.pop()
        assert part is not None
        assert (to, note.offset, note.size, len(part)) == ("asker", offset, len(IMAGE), length)
        assert note.lineage == ancestors
    exchange.hear(message("asker", size=0, digest="0" * 64), 0.0)
    assert run.sent.pop() == ("asker", Note("0" * 64, 0, -1), None)


def test_an_image_that_is_read_outlives_newer_ones(exchange: Exchange, run: Run) -> None:
    for number in range(4):
        exchange._images[str(number) * 64] = IMAGE, ()
        exchange.hear(message("asker", size=0, digest="0" * 64), 0.0)
    assert set(exchange._images) == {"0" * 64, "2" * 64, "3" * 64}


def test_a_copy_is_whole_when_its_digest_is_true(exchange: Exchange, run: Run) -> None:
    copy = copying(exchange, run)
    ancestor = {"peer": "older", "state": [3, "1" * 64], "score": 0.5, "values": VALUES}
    exchange.hear(message(BEST, IMAGE[:100], lineage=[ancestor]), 1.0)
    assert run.sent.pop() == (BEST, Note(_digest(IMAGE), 100), None)
    assert exchange.whole is None
    exchange.hear(message("peer1", IMAGE[100:], offset=100), 2.0)
    exchange.hear(message(BEST, IMAGE[100:], offset=90), 2.0)
    exchange.hear(message(BEST, IMAGE[100:], offset=100, digest="0" * 64), 2.0)
    exchange.hear(Message(BEST, "population", {}, {"digest": 3}), 2.0)
    assert (copy.got, exchange.whole) == (100, None), "another sender, place, image, or no note"
    exchange.hear(message(BEST, IMAGE[100:], offset=100), 2.0)
    assert exchange.whole is copy
    assert torch.equal(copy.image, IMAGE)
    assert [one.peer for one in copy.lineage] == ["older"]
    exchange.ended(outcome(row(ME, 0.0), row(BEST, 2.0)), 3.0)
    assert not run.sent, "one copy at a time"


@pytest.mark.parametrize(
    ("part", "fields", "told"),
    [
        (None, {"size": -1}, "has not these weights any more"),
        (None, {}, "sent no part of its weights"),
        (IMAGE.float(), {}, "sent no part of its weights"),
        (IMAGE.view(2, -1), {}, "sent no part of its weights"),
        (IMAGE[:0], {}, "sent no part of its weights"),
        (torch.cat([IMAGE, IMAGE]), {}, "sent no part of its weights"),
        (IMAGE, {"size": 1001}, "sent no part of its weights"),
        (IMAGE.flip(0), {}, "sent weights of another digest"),
    ],
    ids=["gone", "nothing", "floats", "matrix", "empty", "too long", "too large", "changed"],
)
def test_what_is_no_true_copy_is_given_up(
    exchange: Exchange, run: Run, caplog: pytest.LogCaptureFixture, part: Any, fields: Any, told: str
) -> None:
    copying(exchange, run)
    exchange.hear(message(BEST, part, **fields), 1.0)
    assert (exchange.whole, exchange._copy) == (None, None)
    assert f"this member keeps its own weights: ..{BEST} {told}" in caplog.text
    copying(exchange, run)  # The next round may have another one.


def test_a_member_that_falls_silent_in_mid_copy_is_given_up(
    exchange: Exchange, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    copying(exchange, run)
    exchange.hear(message(BEST, IMAGE[:100]), 5.0)
    run.now = 5.0 + SILENT_SECONDS
    exchange.turn()
    assert exchange._copy is not None
    run.now += 0.1
    exchange.turn()
    assert (exchange.whole, exchange._copy) == (None, None)
    assert f"..{BEST} is silent" in caplog.text


def test_the_table_has_the_rows_that_make_sense(exchange: Exchange) -> None:
    rows = [row(f"peer{index}", float(index)) for index in range(6)]
    found = outcome(*rows, parents={"peer0": BEST, "peer1": "unknown"})
    reports = dict(found.reports)
    reports["peer3"] = {"lr": 0.1}, {"score": 9.0}
    reports["peer4"] = {"lr": 2.0, "drop": 0.5}, {"score": 9.0}
    reports["peer5"] = VALUES, {}
    exchange.ended(Outcome(**{**_fields(found), "reports": reports}), 0.0)
    exchange.ended(outcome(*rows, ok=False), 0.0)
    (table,) = exchange.tables
    assert [(one.peer, one.score, one.parent) for one in table] == [
        (BEST, 2.0, None),
        ("peer1", 1.0, None),
        ("peer0", 0.0, BEST),
    ]


def _fields(found: Outcome) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__struct_fields__}
