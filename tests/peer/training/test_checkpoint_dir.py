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
from equipoise.peer.training.checkpoint import (
    IMAGE_FILE,
    MAX_FOLDER_CHARS,
    PARTIAL,
    CheckpointError,
    Damaged,
    Folder,
    Misfit,
    Subject,
    folder_name,
    read_manifest,
)
from equipoise.peer.training.image import Image
from equipoise.peer.training.safetensors_io import ImageError

OWN = Subject("digits", {"model": "one"})


def state(epoch: int) -> StateId:
    return StateId(epoch, f"{epoch:064x}")


def opened(path: Path, subject: Subject, keep: int = 3) -> contextlib.closing[Folder]:
    return contextlib.closing(Folder(path, subject, keep))


def write(folder: Folder, epoch: int) -> Path:
    """Write a checkpoint whose image is its epoch; each a second after the one before, by the clock of its files."""
    path = folder.write(state(epoch), torch.tensor(list(str(epoch).encode()), dtype=torch.uint8))
    second = len(list(folder.path.parent.glob("tick*")))
    (folder.path.parent / f"tick{second}").touch()
    os.utime(path, (second, second))
    return path


def load(folder: Folder) -> tuple[int, str]:
    """Epoch of what was loaded, and why that."""
    loaded: list[int] = []

    def read(image: torch.Tensor) -> Image:
        epoch = int(bytes(image.tolist()))
        return Image(state(epoch), lambda: loaded.append(epoch))

    found = folder.load(100, read)
    assert found is not None
    resumed, origin = found
    assert loaded == [resumed.epoch]
    return loaded[0], origin


def epochs(folder: Folder) -> list[int]:
    return sorted(read_manifest(path).state.epoch for path in folder.path.glob("epoch-*"))


def damage(path: Path) -> None:
    os.truncate(path / IMAGE_FILE, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "digits"


def test_the_newest_is_loaded_by_another_start(path: Path) -> None:
    with opened(path, OWN) as folder:
        for epoch in (10, 20, 30):
            write(folder, epoch)
    with opened(path, OWN) as folder:
        epoch, origin = load(folder)
    assert epoch == 30
    assert origin.endswith("epoch 30: the newest")


def test_an_empty_folder_has_nothing_to_load(path: Path) -> None:
    with opened(path, OWN) as folder:
        assert folder.load(100, lambda image: pytest.fail("no checkpoint can be loaded")) is None
        assert folder.furthest is None


def test_a_damaged_one_is_passed_over_and_the_reason_says_so(path: Path) -> None:
    with opened(path, OWN) as folder:
        write(folder, 10)
        damage(write(folder, 20))
        epoch, reason = load(folder)
    assert epoch == 10
    assert "passed over" in reason
    assert "is truncated: state.safetensors has 0 bytes of 2" in reason


def test_nothing_sound_is_an_error_that_says_what_is_wrong_with_the_newest(path: Path) -> None:
    with opened(path, OWN) as folder:
        for epoch in (10, 20):
            damage(write(folder, epoch))
        with pytest.raises(
            Damaged, match=r"0{10}20-.* is truncated.* \(1 older ones are no better\); remove"
        ):
            load(folder)


def test_one_of_another_run_is_not_passed_over(path: Path) -> None:
    with opened(path, Subject("letters", OWN.terms)) as folder:
        write(folder, 10)
    with opened(path, OWN) as folder, pytest.raises(Misfit, match="is of run 'letters', not of 'digits'"):
        load(folder)


def refuse(image: torch.Tensor) -> Image:
    raise ImageError("'weight' has shape [4, 3] here, got [2, 3]")


def test_an_image_that_the_model_refuses_is_a_misfit(path: Path) -> None:
    with opened(path, OWN) as folder:
        write(folder, 10)
        with pytest.raises(
            Misfit, match=r"does not fit: 'weight' has shape \[4, 3\] here, got \[2, 3\]; nothing was"
        ):
            folder.load(100, refuse)


def test_an_image_of_another_state_than_the_manifest_says_is_not_loaded(path: Path) -> None:
    with opened(path, OWN) as folder:
        write(folder, 10)
        with pytest.raises(Misfit, match="claims to be of"):
            folder.load(100, lambda image: Image(state(11), lambda: pytest.fail("it was loaded")))


def test_the_oldest_are_removed(path: Path) -> None:
    with opened(path, OWN, keep=2) as folder:
        for epoch in (10, 20, 30, 40):
            write(folder, epoch)
            assert len(epochs(folder)) <= 2
        assert epochs(folder) == [30, 40]
        assert not list(path.glob(PARTIAL + "*"))


def test_a_damaged_one_takes_no_place_of_a_sound_one(path: Path) -> None:
    with opened(path, OWN, keep=2) as folder:
        write(folder, 10)
        damage(write(folder, 20))
        assert load(folder)[0] == 10
        write(folder, 15)
        assert epochs(folder) == [10, 15]


def test_the_one_just_written_stays_though_it_is_of_an_earlier_epoch(path: Path) -> None:
    with opened(path, OWN, keep=1) as folder:
        write(folder, 50)
    with opened(path, OWN, keep=1) as folder:
        write(folder, 10)
        assert epochs(folder) == [10, 50]  # Who forgot to resume has not lost what got furthest.
        write(folder, 20)
        assert epochs(folder) == [20, 50]
        write(folder, 60)
        assert epochs(folder) == [60]


def test_what_a_crash_left_is_not_loaded_and_is_removed(path: Path) -> None:
    with opened(path, OWN) as folder:
        whole = write(folder, 10)
    shutil.copytree(whole, path / f"{PARTIAL}epoch-000000000020-01234567")
    with opened(path, OWN) as folder:
        assert load(folder)[0] == 10
        assert not list(path.glob(PARTIAL + "*"))


def test_two_of_one_epoch_are_kept_apart(path: Path) -> None:
    with opened(path, OWN) as folder:
        assert write(folder, 10) != write(folder, 10)
        assert epochs(folder) == [10, 10]


def test_one_process_writes_at_a_time(path: Path) -> None:
    with opened(path, OWN), pytest.raises(CheckpointError, match="another process writes checkpoints to"):
        Folder(path, OWN)
    Folder(path, OWN).close()


def test_a_place_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*; give another directory"):
        Folder(tmp_path / "file" / "digits", OWN)


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
        with opened(path, OWN, keep=1) as folder:
            write(folder, 10)
            with monkeypatch.context() as patched:
                die_at(moment, patched)
                try:
                    write(folder, 20)
                    break
                except Crash:
                    pass
        with opened(path, OWN, keep=1) as folder:
            survived.append(load(folder)[0])
            write(folder, 30)
            assert epochs(folder) == [30]
            assert not list(path.glob(PARTIAL + "*"))
    assert survived[0] == 10
    assert survived[-1] == 20
    assert survived == sorted(survived)
    assert len(survived) >= 8
