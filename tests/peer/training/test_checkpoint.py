"""One checkpoint: written whole or not at all, read only if all of it is as it was written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from equipoise.averaging.state import StateId
from equipoise.peer.training.checkpoint_files import (
    FORMAT,
    IMAGE_FILE,
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    Damaged,
    Misfit,
    Subject,
    read_checkpoint,
    write_checkpoint,
)

TERMS = {"model": "2 tensors, 6 values, 3fa0", "optimizer": "AdamW(lr=0.001)", "target batch size": "4096"}
OWN = Subject("digits", TERMS)
STATE = StateId(40, "0123456789abcdef" * 4)
TENSORS = {"weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(40)}
IMAGE = save(TENSORS)
LIMIT = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "one"
    write_checkpoint(path, OWN, STATE, memoryview(IMAGE))
    return path


def read(path: Path, own: Subject = OWN, limit: int = LIMIT) -> dict[str, torch.Tensor]:
    return load(bytes(read_checkpoint(path, own, limit)[1]))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    change(manifest)
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))


def test_what_was_written_is_read(checkpoint: Path) -> None:
    loaded = read(checkpoint)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert sorted(path.name for path in checkpoint.iterdir()) == [MANIFEST_FILE, IMAGE_FILE]
    assert not [path for path in checkpoint.parent.iterdir() if path != checkpoint]


def test_the_manifest_is_json_for_people(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / MANIFEST_FILE).read_text())
    assert manifest["format"] == FORMAT
    assert manifest["subject"] == {"run": "digits", "terms": TERMS}
    assert manifest["spec"] == OWN.spec
    assert manifest["state"] == [40, STATE.lineage]
    assert manifest["size"] == len(IMAGE)


def cut(path: Path) -> None:
    os.truncate(path / IMAGE_FILE, len(IMAGE) - 1)


def lengthen(path: Path) -> None:
    with (path / IMAGE_FILE).open("ab") as file:
        file.write(b"0")


def flip(path: Path) -> None:
    image = bytearray((path / IMAGE_FILE).read_bytes())
    image[-3] ^= 1
    (path / IMAGE_FILE).write_bytes(image)


def link(path: Path) -> None:
    (path / IMAGE_FILE).rename(path.parent / "elsewhere")
    (path / IMAGE_FILE).symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    (path / IMAGE_FILE).unlink()
    os.mkfifo(path / IMAGE_FILE)


DAMAGE = {
    "truncated": (cut, f"is truncated: state.safetensors has {len(IMAGE) - 1} bytes of {len(IMAGE)}"),
    "longer": (lengthen, f"has more than {len(IMAGE)} bytes"),
    "a flipped bit": (flip, "has digest"),
    "no image": (lambda path: (path / IMAGE_FILE).unlink(), "No such file"),
    "a link": (link, "symbolic links"),
    "a pipe": (pipe, "is not a file"),
    "no manifest": (lambda path: (path / MANIFEST_FILE).unlink(), "No such file"),
    "half a manifest": (lambda path: os.truncate(path / MANIFEST_FILE, 90), "manifest.json: Input data"),
    "an endless manifest": (
        lambda path: (path / MANIFEST_FILE).write_bytes(b" " * (MAX_MANIFEST_BYTES + 10)),
        "manifest.json: Input data",
    ),
    "deep nesting": (lambda path: (path / MANIFEST_FILE).write_bytes(b"[" * 60_000), "manifest.json:"),
    "an edited run": (
        lambda path: edit(path, lambda manifest: manifest["subject"].update(run="letters")),
        "does not agree with its own hash",
    ),
    "no digest": (
        lambda path: edit(path, lambda manifest: manifest.pop("digest")),
        "missing required field `digest`",
    ),
    "another type": (lambda path: edit(path, lambda manifest: manifest.update(size="big")), "Expected `int`"),
    "an epoch below 0": (
        lambda path: edit(path, lambda manifest: manifest.update(state=[-1, STATE.lineage])),
        "Expected `int` >= 0",
    ),
    "a newer format": (
        lambda path: edit(path, lambda manifest: manifest.update(format=FORMAT + 1, subject="new")),
        f"is of format {FORMAT + 1}; this version of equipoise reads format {FORMAT}; upgrade equipoise",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_in_one_line(checkpoint: Path, damage: str) -> None:
    inflict, expected = DAMAGE[damage]
    inflict(checkpoint)
    with pytest.raises(Damaged) as caught:
        read(checkpoint)
    assert expected in str(caught.value)
    assert str(checkpoint) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (Subject("letters", TERMS), "is of run 'digits', not of 'letters'; give the directory"),
        (
            Subject("digits", {**TERMS, "target batch size": "1024"}),
            "was written with another target batch size: '4096' there, '1024' here; resume with the same",
        ),
        (
            Subject("digits", {**TERMS, "model": "3 tensors, 8 values, 77d1"}),
            "was written with another model: '2 tensors, 6 values, 3fa0' there, '3 tensors, 8 values, 77d1' here",
        ),
        (Subject("digits", {**TERMS, "clip": "1.0"}), "another clip: 'not set' there, '1.0' here"),
    ],
)
def test_another_run_model_or_term_is_named(checkpoint: Path, own: Subject, expected: str) -> None:
    with pytest.raises(Misfit) as caught:
        read(checkpoint, own)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_image_that_is_too_large_is_not_read(checkpoint: Path) -> None:
    with pytest.raises(Misfit, match=f"{len(IMAGE)} bytes; expected at most 100"):
        read(checkpoint, limit=100)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path / "one", OWN, STATE, memoryview(IMAGE))
    assert not list(tmp_path.iterdir())
