"""The checkpoints of a run: which one is found again, which are removed, and who may write."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.averaging.state import StateId
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.training.checkpoint import MAX_FOLDER_CHARS, Checkpoints, Keeper, folder_name
from equipoise.peer.training.checkpoint_files import (
    IMAGE_FILE,
    PARTIAL,
    CheckpointError,
    Damaged,
    Misfit,
    Subject,
    read_manifest,
)
from equipoise.peer.training.image import Image

OWN = Subject("digits", {"model": "one"})


def state(epoch: int) -> StateId:
    return StateId(epoch, f"{epoch:064x}")


class Replica:
    """A replica whose image is its epoch.

    Attributes:
        loaded: The epochs of the images that it has loaded.
    """

    limit = 100

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def read(self, image: torch.Tensor) -> Image:
        epoch = int(bytes(image.tolist()))
        return Image(state(epoch), lambda: self.loaded.append(epoch))


def opened(path: Path, subject: Subject, keep: int = 3) -> contextlib.closing[Keeper]:
    member: Any = Replica()
    return contextlib.closing(Keeper(member, path, subject, Checkpoints(keep=keep), resume=True))


def write(keeper: Keeper, epoch: int) -> Path:
    """Write a checkpoint whose image is its epoch; each a second after the one before, by the clock of its files."""
    before = set(keeper.path.iterdir())
    keeper._write(state(epoch), lambda: torch.tensor(list(str(epoch).encode()), dtype=torch.uint8))
    (path,) = set(keeper.path.glob("epoch-*")) - before
    second = len(list(keeper.path.parent.glob("tick*")))
    (keeper.path.parent / f"tick{second}").touch()
    os.utime(path, (second, second))
    return path


def load(keeper: Keeper) -> tuple[int, str]:
    """Epoch of what was loaded, and why that."""
    member: Any = keeper._member
    member.loaded.clear()
    found = keeper.load()
    assert found is not None
    resumed, origin = found
    assert member.loaded == [resumed.epoch]
    return resumed.epoch, origin


def epochs(keeper: Keeper) -> list[int]:
    return sorted(read_manifest(path).state.epoch for path in keeper.path.glob("epoch-*"))


def damage(path: Path) -> None:
    os.truncate(path / IMAGE_FILE, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "digits"


def test_the_newest_is_loaded_by_another_start(path: Path) -> None:
    with opened(path, OWN) as keeper:
        for epoch in (10, 20, 30):
            write(keeper, epoch)
    with opened(path, OWN) as keeper:
        epoch, origin = load(keeper)
    assert epoch == 30
    assert origin.endswith("epoch 30: the newest")


def test_an_empty_folder_has_nothing_to_load(path: Path) -> None:
    with opened(path, OWN) as keeper:
        assert keeper.load() is None


def test_a_damaged_one_is_passed_over_and_the_reason_says_so(path: Path) -> None:
    with opened(path, OWN) as keeper:
        write(keeper, 10)
        damage(write(keeper, 20))
        epoch, reason = load(keeper)
    assert epoch == 10
    assert "passed over" in reason
    assert "is truncated: state.safetensors has 0 bytes of 2" in reason


def test_nothing_sound_is_an_error_that_says_what_is_wrong_with_the_newest(path: Path) -> None:
    with opened(path, OWN) as keeper:
        for epoch in (10, 20):
            damage(write(keeper, epoch))
        with pytest.raises(
            Damaged, match=r"0{10}20-.* is truncated.* \(1 older ones are no better\); remove"
        ):
            load(keeper)


def test_one_of_another_run_is_not_passed_over(path: Path) -> None:
    with opened(path, Subject("letters", OWN.terms)) as keeper:
        write(keeper, 10)
    with opened(path, OWN) as keeper, pytest.raises(Misfit, match="is of run 'letters', not of 'digits'"):
        load(keeper)


def refuse(replica: Replica, image: torch.Tensor) -> Image:
    raise ImageError("'weight' has shape [4, 3] here, got [2, 3]")


def test_an_image_that_the_model_refuses_is_a_misfit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "read", refuse)
    with opened(path, OWN) as keeper:
        write(keeper, 10)
        with pytest.raises(
            Misfit, match=r"does not fit: 'weight' has shape \[4, 3\] here, got \[2, 3\]; nothing was"
        ):
            keeper.load()


def test_an_image_of_another_state_than_the_manifest_says_is_not_loaded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Image(state(11), lambda: pytest.fail("it was loaded"))
    monkeypatch.setattr(Replica, "read", lambda replica, image: other)
    with opened(path, OWN) as keeper:
        write(keeper, 10)
        with pytest.raises(Misfit, match="claims to be of"):
            keeper.load()


def test_the_oldest_are_removed(path: Path) -> None:
    with opened(path, OWN, keep=2) as keeper:
        for epoch in (10, 20, 30, 40):
            write(keeper, epoch)
            assert len(epochs(keeper)) <= 2
        assert epochs(keeper) == [30, 40]
        assert not list(path.glob(PARTIAL + "*"))


def test_a_damaged_one_takes_no_place_of_a_sound_one(path: Path) -> None:
    with opened(path, OWN, keep=2) as keeper:
        write(keeper, 10)
        damage(write(keeper, 20))
        assert load(keeper)[0] == 10
        write(keeper, 15)
        assert epochs(keeper) == [10, 15]


def test_the_one_just_written_stays_though_it_is_of_an_earlier_epoch(path: Path) -> None:
    with opened(path, OWN, keep=1) as keeper:
        write(keeper, 50)
    with opened(path, OWN, keep=1) as keeper:
        write(keeper, 10)
        assert epochs(keeper) == [10, 50]  # Who forgot to resume has not lost what got furthest.
        write(keeper, 20)
        assert epochs(keeper) == [20, 50]
        write(keeper, 60)
        assert epochs(keeper) == [60]


def test_what_a_crash_left_is_not_loaded_and_is_removed(path: Path) -> None:
    with opened(path, OWN) as keeper:
        whole = write(keeper, 10)
    shutil.copytree(whole, path / f"{PARTIAL}epoch-000000000020-01234567")
    with opened(path, OWN) as keeper:
        assert load(keeper)[0] == 10
        assert not list(path.glob(PARTIAL + "*"))


def test_two_of_one_epoch_are_kept_apart(path: Path) -> None:
    with opened(path, OWN) as keeper:
        assert write(keeper, 10) != write(keeper, 10)
        assert epochs(keeper) == [10, 10]


def test_one_process_writes_at_a_time(path: Path) -> None:
    with opened(path, OWN), pytest.raises(CheckpointError, match="another process writes checkpoints to"):
        opened(path, OWN)
    with opened(path, OWN):
        pass


def test_a_place_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*; give another directory"):
        opened(tmp_path / "file" / "digits", OWN)


def test_every_run_has_a_folder_of_its_own() -> None:
    names = ["digits", "a/b", "a.b", "..", ".", "a%2Fb", "a b", "é" * 59, "é" * 58 + "e", "語" * 59]
    folders = [folder_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert folders[0] == "digits"
    for folder in folders:
        assert "/" not in folder
        assert not folder.startswith(".")
        assert len(folder.encode()) <= MAX_FOLDER_CHARS + 17


class Crash(BaseException):
    """The process has gone."""


def die_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the `moment`-th call on that changes the disk, nothing changes it any more."""
    calls = itertools.count()

    def mortal(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= moment:
                raise Crash
            return real(*args, **kwargs)

        return call

    for place, name in ((Path, "mkdir"), (Path, "rename"), (Path, "open"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(place, name, mortal(getattr(place, name)))


def test_a_crash_at_any_moment_leaves_the_newest_whole_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survived: list[int] = []
    for moment in itertools.count():
        shutil.rmtree(path, ignore_errors=True)
        with opened(path, OWN, keep=1) as keeper:
            write(keeper, 10)
            with monkeypatch.context() as patched:
                die_at(moment, patched)
                try:
                    write(keeper, 20)
                    break
                except Crash:
                    pass
        with opened(path, OWN, keep=1) as keeper:
            survived.append(load(keeper)[0])
            write(keeper, 30)
            assert epochs(keeper) == [30]
            assert not list(path.glob(PARTIAL + "*"))
    assert survived[0] == 10
    assert survived[-1] == 20
    assert survived == sorted(survived)
    assert len(survived) >= 8
