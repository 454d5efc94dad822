"""Checkpoints beside training: when they are due, what is told when one fails, and what resuming finds."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.averaging.schema import Schema
from equipoise.averaging.state import StateId
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.config import RESUME_ENV
from equipoise.peer.training import checkpoint
from equipoise.peer.training.checkpoint import BEST, NEW_BEST, Checkpoints, Keeper, Mode, keep_checkpoints
from equipoise.peer.training.checkpoint_files import Subject, read_manifest, write_checkpoint
from equipoise.peer.training.image import Image

OWN = Subject("digits", {"model": "one"})


def state(epoch: int) -> StateId:
    return StateId(epoch, f"{epoch:064x}")


class Trained:
    """A replica at an epoch, with an image that says which."""

    def __init__(self) -> None:
        self.id, self.whole, self.images, self.limit = state(0), True, 0, 100

    def image(self) -> torch.Tensor:
        self.images += 1
        return torch.tensor(list(str(self.id.epoch).encode()), dtype=torch.uint8)

    def read(self, image: torch.Tensor) -> Image:
        return Image(state(int(bytes(image.tolist()))), lambda: None)


def opened(path: Path, every: int = 10, resume: bool = False, member: Any = None) -> Keeper:
    return Keeper(member or Trained(), path / "digits", OWN, Checkpoints(every=every), resume)


def kept(home: Path, checkpoints: Checkpoints | None, told: list[str] | None = None) -> Keeper | None:
    """The keeper of a run whose daemon has that home, and shows the lines that are told."""
    shown = [] if told is None else told
    layout = SimpleNamespace(schema=Schema.of({"w": torch.zeros(2)}))
    core = SimpleNamespace(
        link=SimpleNamespace(welcome=SimpleNamespace(home=home)),
        binding=SimpleNamespace(steps=SimpleNamespace(layout=layout)),
        tell=lambda topic, line: shown.append(line),
        loop=SimpleNamespace(finishing=[]),
    )
    run: Any = SimpleNamespace(core=core, name="digits", terms={})
    member: Any = Trained()
    return keep_checkpoints(member, run, checkpoints)


def record(keeper: Keeper, epoch: int) -> None:
    keeper.record(state(epoch), torch.tensor(list(str(epoch).encode()), dtype=torch.uint8))
    keeper.settle()


def epochs(keeper: Keeper) -> list[int]:
    return sorted(read_manifest(path).state.epoch for path in keeper.path.glob("epoch-*"))


def test_one_is_due_every_so_many_epochs_also_where_epochs_were_jumped(tmp_path: Path) -> None:
    keeper = opened(tmp_path)
    due = []
    for epoch in (1, 9, 10, 11, 19, 37, 38, 40):
        if keeper.due(epoch):
            due.append(epoch)
            record(keeper, epoch)
    assert due == [10, 37, 40]
    keeper.close()


def test_they_live_in_the_home_unless_told_otherwise(tmp_path: Path) -> None:
    inside = kept(tmp_path / "home", Checkpoints())
    elsewhere = kept(tmp_path / "home", Checkpoints(directory=tmp_path / "disk"))
    assert inside is not None
    assert elsewhere is not None
    assert inside.path == tmp_path / "home" / "checkpoints" / "digits"
    assert elsewhere.path == tmp_path / "disk" / "digits"
    inside.close()
    elsewhere.close()


def test_the_last_state_is_written_at_the_end_once(tmp_path: Path) -> None:
    member = Trained()
    keeper = opened(tmp_path, member=member)
    record(keeper, 10)
    member.id = state(13)
    keeper.finish()
    again = opened(tmp_path, resume=True, member=member)
    again.restore()
    assert again.recorded == state(13)
    images = member.images
    again.finish()
    assert member.images == images  # It is on the disk already.
    assert epochs(again) == [10, 13]


def test_what_was_resumed_counts_as_recorded(tmp_path: Path) -> None:
    keeper = opened(tmp_path)
    record(keeper, 10)
    keeper.close()
    again = opened(tmp_path, resume=True)
    again.restore()
    assert not again.due(10)
    assert not again.due(12)
    assert again.due(20)
    again.close()


def test_a_failure_is_told_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = opened(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_checkpoint", full)
        record(keeper, 10)
    assert "the checkpoint of epoch 10 could not be written" in caplog.text
    assert "No space left on device" in caplog.text
    assert keeper.recorded is None
    record(keeper, 20)
    assert keeper.recorded == state(20)
    keeper.close()


def test_a_last_state_that_cannot_be_copied_is_told_too(tmp_path: Path) -> None:
    told: list[str] = []
    member: Any = Trained()
    member.id = state(3)
    keeper = opened(tmp_path, member=member)
    keeper.tell = told.append

    def image() -> torch.Tensor:
        raise ImageError("'extra' is a set")

    member.image = image
    keeper.finish()
    assert told == ["the checkpoint of epoch 3 could not be written: 'extra' is a set"]


def test_training_does_not_wait_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member, free = Trained(), threading.Event()
    keeper = opened(tmp_path, member=member)

    def slow(*args: Any) -> None:
        assert free.wait(60)
        write_checkpoint(*args)

    monkeypatch.setattr(checkpoint, "write_checkpoint", slow)
    keeper.record(state(10), member.image())
    assert not keeper.due(20)
    assert not keeper.due(21)
    assert (
        caplog.text.count("the checkpoint of epoch 20 is late: the one of epoch 10 is still being written")
        == 1
    )
    assert "epoch 21" not in caplog.text
    free.set()
    keeper.settle()
    assert keeper.due(22)
    member.id = state(31)
    keeper.finish()
    assert epochs(keeper) == [10, 31]


@pytest.mark.parametrize(("said", "resumes"), [(None, False), ("1", True), ("", False)])
def test_launch_says_whether_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, resumes: bool
) -> None:
    if said is None:
        monkeypatch.delenv(RESUME_ENV, raising=False)
    else:
        monkeypatch.setenv(RESUME_ENV, said)
    with_default = kept(tmp_path, Checkpoints())
    assert with_default is not None
    assert with_default.resume == resumes
    with_default.close()


@pytest.mark.parametrize(("said", "lines"), [("1", 1), ("", 0)])
def test_a_training_without_checkpoints_says_that_it_resumes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, lines: int
) -> None:
    monkeypatch.setenv(RESUME_ENV, said)
    told: list[str] = []
    assert kept(tmp_path, None, told) is None
    assert told == [checkpoint.NOTHING_RESUMES] * lines


def test_nothing_to_resume_from_is_said_and_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keeper = opened(tmp_path, resume=True)
    keeper.restore()
    assert keeper.recorded is None
    assert "nothing to resume from" in caplog.text
    keeper.close()


def test_a_start_that_forgot_to_resume_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = opened(tmp_path)
    record(keeper, 50)
    keeper.close()
    again = opened(tmp_path)
    again.restore()
    assert again.recorded is None  # Nobody asked to resume.
    assert "holds a checkpoint of epoch 50" in caplog.text
    again.close()


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}, {"every": 1.5}, {"keep": True}])
def test_numbers_out_of_range_are_mistakes(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"expected {next(iter(wrong))} to be a whole number of at least 1"):
        Checkpoints(**wrong)


# ---- the best one ----


def keeper_of(path: Path, best: str, every: int = 1000, mode: Mode = "max") -> tuple[Any, Keeper]:
    member: Any = Trained()
    options = Checkpoints(every=every, best=best, mode=mode)
    keeper = Keeper(member, path / "digits", OWN, options, resume=False)
    keeper()
    return member, keeper


def train(member: Any, keeper: Keeper, *scores: dict[str, float]) -> None:
    """One step for each evaluation of the state before it."""
    for evaluation in scores:
        keeper.best.score(member.id, evaluation)
        member.id = state(member.id.epoch + 1)
        keeper()


def score(keeper: Keeper, member: Any, epoch: int, accuracy: float) -> None:
    """Have the replica hold the state of an epoch, and the group evaluate that."""
    member.id = state(epoch)
    keeper()
    keeper.best.score(member.id, {"accuracy": accuracy})


def best(keeper: Keeper) -> tuple[int, dict[str, float], bytes]:
    keeper.settle()
    manifest = read_manifest(keeper.path / BEST)
    return manifest.state.epoch, manifest.scores, (keeper.path / BEST / "state.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("metric", "mode", "epoch", "value"),
    [("accuracy", "max", 2, 0.9), ("loss", "max", 2, 0.9), ("loss", "min", 0, 0.3), ("wer", "min", 0, 0.3)],
)
def test_the_best_by_a_metric_is_kept_beside_the_others(
    tmp_path: Path, metric: str, mode: Any, epoch: int, value: float
) -> None:
    member, keeper = keeper_of(tmp_path, metric, every=4, mode=mode)
    train(member, keeper, *({metric: score, "other": 1.0} for score in (0.3, 0.5, 0.9, 0.9, 0.4)), {})
    assert best(keeper) == (epoch, {metric: value}, str(epoch).encode())
    keeper.close()
    assert epochs(keeper) == [4]


def test_a_score_of_a_state_that_is_not_held_any_more_keeps_nothing(tmp_path: Path) -> None:
    member, keeper = keeper_of(tmp_path, "accuracy")
    member.id = state(1)
    keeper()
    keeper.best.score(state(0), {"accuracy": 0.9})
    keeper.close()
    assert not (keeper.path / BEST).exists()


def test_an_interrupted_update_is_not_the_best(tmp_path: Path) -> None:
    member, keeper = keeper_of(tmp_path, "accuracy")
    member.whole = False
    keeper()
    keeper.best.score(state(0), {"accuracy": 0.9})
    keeper.close()
    assert not (keeper.path / BEST).exists()


def test_no_image_is_made_for_the_best_where_nobody_asked_for_it(tmp_path: Path) -> None:
    member, keeper = keeper_of(tmp_path, "")
    train(member, keeper, {"accuracy": 0.9}, {})
    keeper.close()
    assert member.images == 0


def test_a_later_start_knows_the_best_and_does_not_resume_from_it(tmp_path: Path) -> None:
    member, keeper = keeper_of(tmp_path, "accuracy", every=3)
    train(member, keeper, *({"accuracy": score} for score in (0.1, 0.9, 0.2)))
    keeper.close()
    again = Keeper(member, keeper.path, OWN, Checkpoints(best="accuracy"), resume=True)
    again.restore()
    assert again.recorded == state(3)
    score(again, member, 4, 0.8)
    assert best(again)[0] == 1
    score(again, member, 5, 0.95)
    assert best(again)[0] == 5
    again.close()


def test_the_best_of_another_training_or_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    member: Any = Trained()
    for number, subject in enumerate((OWN, Subject("digits", {"model": "two"}))):
        keeper = Keeper(member, tmp_path, subject, Checkpoints(best="accuracy"), resume=False)
        score(keeper, member, number, 0.9 - number / 10)
        assert best(keeper)[0] == number
        keeper.close()
    (keeper.path / BEST / "manifest.json").write_text("{")
    keeper = Keeper(member, tmp_path, OWN, Checkpoints(best="accuracy"), resume=False)
    score(keeper, member, 7, 0.1)
    assert best(keeper)[0] == 7
    keeper.close()


def test_a_crash_before_the_best_is_in_its_place_loses_neither(tmp_path: Path) -> None:
    member, keeper = keeper_of(tmp_path, "accuracy")
    score(keeper, member, 1, 0.5)
    keeper.close()
    write_checkpoint(keeper.path / NEW_BEST, OWN, state(2), memoryview(b"2"), {"accuracy": 0.6})
    again = Keeper(member, keeper.path, OWN, Checkpoints(best="accuracy"), resume=False)
    assert best(again)[:2] == (2, {"accuracy": 0.6})
    again.close()


def test_a_best_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    member, keeper = keeper_of(tmp_path, "accuracy")
    keeper.tell = told.append

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_checkpoint", full)
    score(keeper, member, 1, 0.5)
    keeper.close()
    assert told == [
        "epoch 1, with the highest accuracy so far, 0.5, could not be written: [Errno 28] No space left on device"
    ]


def test_the_best_needs_the_name_of_a_metric_and_a_trainer_that_scores(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a metric's name"):
        Checkpoints(best="x" * 25)
    wrong: Any = "less"
    with pytest.raises(ValueError, match="expected mode to be 'max' or 'min', got 'less'"):
        Checkpoints(best="loss", mode=wrong)
    anything: Any = SimpleNamespace()
    with pytest.raises(ValueError, match="best='accuracy' needs a trainer that evaluates the model"):
        keep_checkpoints(anything, anything, Checkpoints(best="accuracy", directory=tmp_path))
