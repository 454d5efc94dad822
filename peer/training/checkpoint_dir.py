"""The checkpoints of one run: the newest sound one is found, and those that are too many are removed."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import quote

import msgspec
import torch
from blake3 import blake3

from equipoise.averaging.state import StateId
from equipoise.peer.training.checkpoint import (
    FORMAT,
    PARTIAL,
    CheckpointError,
    Damaged,
    Manifest,
    Misfit,
    Subject,
    read_checkpoint,
    write_checkpoint,
)
from equipoise.peer.training.image import Image

LOCK_FILE = ".lock"

MAX_FOLDER_CHARS = 120
"""File systems allow 255 bytes; the name of a run in other letters than ours may grow ninefold when quoted."""

Read = Callable[[torch.Tensor], Image]

_NAME = re.compile(r"\Aepoch-(\d{12,16})-[0-9a-f]{8}\Z")


class Found(msgspec.Struct, frozen=True):
    """A checkpoint that was read, verified and loaded.

    Attributes:
        path: Its directory.
        manifest: What it said of itself.
        reason: Why this one: which newer ones were passed over, and what was wrong with each.
    """

    path: Path
    manifest: Manifest
    reason: str


class Folder:
    """The checkpoints of one run in one directory, which this process alone writes until `close`."""

    def __init__(self, path: Path, subject: Subject, keep: int = 3) -> None:
        """Make the directory if need be, and lock it.

        Args:
            path: The directory; nothing else should be kept in it.
            subject: What checkpoints are written of, and must be of to be loaded.
            keep: How many are kept, at least 1; one more if it is not among the last but got further.

        Raises:
            CheckpointError: It cannot be made, or another process writes there.
        """
        if keep < 1:
            raise ValueError(f"expected to keep at least 1 checkpoint, got {keep}")
        self.path = path
        self._subject = subject
        self._keep = keep
        self._parent: str | None = None
        self._damaged: set[Path] = set()
        self._lock = _lock(path)
        for partial in path.glob(PARTIAL + "*"):
            shutil.rmtree(partial, ignore_errors=True)  # Tried again at the next start.

    def close(self) -> None:
        """Let other processes write there; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, state: StateId, image: torch.Tensor) -> Path:
        """Write one checkpoint, then remove those that are too many; returns its directory.

        Args:
            state: Which state it is.
            image: u8 [bytes], on the CPU.

        Raises:
            OSError: The disk is full, say; what was there before is there still.
        """
        place = self.path / f"epoch-{state.epoch:012d}-{secrets.token_hex(4)}"
        manifest = Manifest(
            format=FORMAT,
            subject=self._subject,
            spec=self._subject.spec,
            state=state,
            parent=self._parent,
        )
        self._parent = write_checkpoint(place, manifest, image.numpy().data).digest
        self._prune(place)
        return place

    def load(self, limit: int, read: Read) -> Found | None:
        """Load the newest checkpoint that is sound.

        Args:
            limit: Most bytes that an image may have here.
            read: Checks an image, u8 [bytes], against the state here, as `TrainingState.read` does.

        Returns:
            What was loaded; None where there is no checkpoint.

        Raises:
            Misfit: One is of another run, model or terms. It is not passed over: to resume from it was a mistake.
            Damaged: There are checkpoints, and none can be read; says what is wrong with the newest.
        """
        passed: list[str] = []
        for _, path in self._listed():
            try:
                manifest, content = read_checkpoint(path, self._subject, limit)
            except Damaged as error:
                passed.append(str(error))
                self._damaged.add(path)
                continue
            _checked(path, manifest, content, read).load()
            self._parent = manifest.digest
            return Found(path, manifest, _why(passed))
        if not passed:
            return None
        older = f" ({len(passed) - 1} older ones are no better)" if passed[1:] else ""
        raise Damaged(passed[0] + older, f"remove {self.path} to start anew")

    @property
    def furthest(self) -> int | None:
        """Epoch of the checkpoint that got furthest, sound or not; None where there is none."""
        return next((epoch for epoch, _ in self._listed()), None)

    def _listed(self) -> list[tuple[int, Path]]:
        """Epochs and directories of all checkpoints, the newest first."""
        found = [(_NAME.match(path.name), path) for path in self.path.iterdir()]
        return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)

    def _prune(self, latest: Path) -> None:
        """Keep those written last, and the one that got furthest: who forgot to resume should not lose it."""
        sound = [path for _, path in self._listed() if path not in self._damaged]
        written = sorted(sound, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        kept = {latest, *sound[:1], *written[: self._keep]}
        for _, path in self._listed():
            if path not in kept:
                # One that is half removed must not be taken for a damaged one.
                gone = path.rename(path.with_name(PARTIAL + path.name))
                shutil.rmtree(gone, ignore_errors=True)
        self._damaged.clear()


def folder_name(run: str) -> str:
    """A file name for the run, another one for each run."""
    name = quote(run, safe=" ").replace(".", "%2E")
    if len(name) <= MAX_FOLDER_CHARS:
        return name
    return f"{name[:MAX_FOLDER_CHARS]}-{blake3(run.encode()).hexdigest()[:16]}"


def _checked(path: Path, manifest: Manifest, content: bytearray, read: Read) -> Image:
    try:
        image = read(torch.frombuffer(content, dtype=torch.uint8))
    except ValueError as error:
        raise Misfit(f"checkpoint {path} does not fit: {error}", "nothing was loaded") from error
    if image.id != manifest.state:
        raise Misfit(f"checkpoint {path} claims to be of {manifest.state}, and holds {image.id}", "remove it")
    return image


def _why(passed: list[str]) -> str:
    if not passed:
        return "the newest"
    return f"the newest that is sound; passed over: {'; '.join(passed)}"


def _lock(path: Path) -> int:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {path}: {error.strerror}", "give another directory"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise CheckpointError(
            f"another process writes checkpoints to {path}", "end it, or give another directory"
        ) from error
    return lock
