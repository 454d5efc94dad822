"""The checkpoints of one run on disk: each is a directory of an image and a manifest, which is whole or not there.

The image is the replicated state as safetensors; the manifest, JSON, says whose state it is and which digest the image
must have. Both are written beside their place, flushed, and renamed into it, so that a crash at any moment leaves what
was there before. What is read back is untrusted: somebody may have copied, truncated or edited it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec
import torch
from blake3 import blake3

from equipoise.averaging.state import StateId
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.training.image import Image

FORMAT = 1
"""Raised when a manifest or an image changes so that an older reader would misread it."""

MANIFEST_FILE = "manifest.json"
IMAGE_FILE = "state.safetensors"

PARTIAL = ".partial-"
"""Begins the name of a directory that is being written or removed."""

MAX_MANIFEST_BYTES = 64 * 1024
"""One with all terms of a run at their longest takes 12 kB; what is longer was not written here."""

CHUNK_BYTES = 16 * 2**20
"""Written and read at a time, so that a digest of the first chunks need not wait for the last."""

MAX_SHOWN = 256
"""Characters of a term that a message shows; terms that were agreed on are no longer."""

LOCK_FILE = ".lock"

MAX_FOLDER_CHARS = 120
"""File systems allow 255 bytes; the name of a run in other letters than ours may grow ninefold when quoted."""

Read = Callable[[torch.Tensor], Image]

_NAME = re.compile(r"\Aepoch-(\d{12,16})-[0-9a-f]{8}\Z")


class CheckpointError(EquipoiseError, ValueError):
    """A checkpoint cannot be written, or cannot be used here; nothing was loaded."""


class Damaged(CheckpointError):
    """This one cannot be read; an older one may be sound."""


class Misfit(CheckpointError):
    """It is sound, and of something else: another run, another model, other terms."""


class Subject(msgspec.Struct, frozen=True):
    """Whose state a checkpoint holds.

    Attributes:
        run: The run's name.
        terms: What must be the same for the state to fit: the model, the optimizer, the target batch size, ... Codec,
            group size and protocol are none of it: they may change between two starts.
    """

    run: str
    terms: dict[str, str]

    @property
    def spec(self) -> str:
        """BLAKE3 in hex of all that: equal ones fit."""
        return blake3(msgspec.json.encode((self.run, sorted(self.terms.items())))).hexdigest()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an image without reading it.

    Attributes:
        format: `FORMAT` of the program that wrote it.
        subject: Whose state it is.
        spec: The subject's hash.
        state: Epoch and lineage.
        size: Length of the image in bytes.
        digest: BLAKE3 of the image, 64 hexadecimal characters.
        parent: Digest of the checkpoint that this process wrote or loaded before it; None for the first.
    """

    format: int
    subject: Subject
    spec: str
    state: StateId
    size: int = 0
    digest: str = ""
    parent: str | None = None


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
            format=FORMAT, subject=self._subject, spec=self._subject.spec, state=state, parent=self._parent
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
            why = f"the newest that is sound; passed over: {'; '.join(passed)}" if passed else "the newest"
            return Found(path, manifest, why)
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


def write_checkpoint(path: Path, manifest: Manifest, image: memoryview) -> Manifest:
    """Write a checkpoint as the new directory `path`.

    Args:
        path: Where it shall be; nothing is there yet.
        manifest: What is known; size and digest are filled in.
        image: The image, bytes.

    Returns:
        The manifest that was written.

    Raises:
        OSError: The disk is full, say; nothing is at `path`.
    """
    partial = path.with_name(PARTIAL + path.name)
    try:
        partial.mkdir(mode=0o700)
        size, digest = _write(partial / IMAGE_FILE, image)
        manifest = msgspec.structs.replace(manifest, size=size, digest=digest)
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
        _write(partial / MANIFEST_FILE, memoryview(text))
        _flush(partial)
        partial.rename(path)
        _flush(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def read_checkpoint(path: Path, own: Subject, limit: int) -> tuple[Manifest, bytearray]:
    """Read the checkpoint in the directory `path` and verify all of it; returns its manifest and its image.

    Args:
        path: The checkpoint's directory.
        own: Whose state it must be.
        limit: Most bytes that an image may have here.

    Raises:
        Misfit: It is of another run, model or terms.
        Damaged: It cannot be read; says what is wrong.
    """
    manifest = read_manifest(path)
    if manifest.spec != manifest.subject.spec:
        raise Damaged(f"checkpoint {path} is damaged: {MANIFEST_FILE} does not agree with its own hash")
    misfit = _misfit(manifest.subject, own)
    if misfit:
        raise Misfit(f"checkpoint {path} {misfit[0]}", misfit[1])
    if manifest.size > limit:
        raise Misfit(
            f"checkpoint {path} has an image of {manifest.size} bytes; expected at most {limit} for this model",
            "give the directory of this run",
        )
    image = _content(path / IMAGE_FILE, manifest.size)
    if len(image) < manifest.size:
        told = f"checkpoint {path} is truncated: {IMAGE_FILE} has {len(image)} bytes of {manifest.size}"
        raise Damaged(told)
    if len(image) > manifest.size:
        raise Damaged(f"checkpoint {path} is damaged: {IMAGE_FILE} has more than {manifest.size} bytes")
    digest = blake3(image).hexdigest()
    if digest != manifest.digest:
        raise Damaged(
            f"checkpoint {path} is damaged: {IMAGE_FILE} has digest {digest[:16]}, not {manifest.digest[:16]}"
        )
    return manifest, image


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in the directory `path`; its image is not looked at.

    Raises:
        Damaged: There is none, it cannot be understood, or a newer program wrote it.
    """
    content = _content(path / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    try:
        version = msgspec.json.decode(content, type=_Version).format
        if version == FORMAT:
            return msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {MANIFEST_FILE}: {error}") from error
    told = f"checkpoint {path} is of format {version}; this version of equipoise reads format {FORMAT}"
    raise Damaged(told, "upgrade equipoise" if version > FORMAT else "write a new one")


class _Version(msgspec.Struct):
    format: int


def _misfit(found: Subject, own: Subject) -> tuple[str, str] | None:
    """What makes another's checkpoint unusable here, and what to do; None if nothing does."""
    if found.run != own.run:
        return f"is of run {found.run!r}, not of {own.run!r}", "give the directory of this run"
    for term in sorted(found.terms.keys() | own.terms.keys()):
        there, here = found.terms.get(term, "not set"), own.terms.get(term, "not set")
        if there != here:
            return (
                f"was written with another {term}: {there[:MAX_SHOWN]!r} there, {here[:MAX_SHOWN]!r} here",
                "resume with the same, or give the run a new name",
            )
    return None


def _write(path: Path, content: memoryview) -> tuple[int, str]:
    """Write a new file down to the disk; returns its length and its BLAKE3."""
    hasher = blake3()
    with path.open("xb", buffering=0) as file:
        for at in range(0, len(content), CHUNK_BYTES):
            chunk = content[at : at + CHUNK_BYTES]
            hasher.update(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return len(content), hasher.hexdigest()


def _flush(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _content(path: Path, limit: int) -> bytearray:
    """All of a file, or its first `limit` + 1 bytes; a link, a pipe or a device is not followed.

    Raises:
        Damaged: It is not there, is not a file, or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb", buffering=0) as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise Damaged(f"checkpoint {path.parent} is damaged: {path.name} is not a file")
            content = bytearray(min(found.st_size, limit + 1))
            view, filled = memoryview(content), 0
            while filled < len(content) and (count := file.readinto(view[filled : filled + CHUNK_BYTES])):
                filled += count
            view.release()
            del content[filled:]
            return content
    except OSError as error:
        raise Damaged(f"checkpoint {path.parent} is damaged: {path.name}: {error.strerror}") from error


def _checked(path: Path, manifest: Manifest, content: bytearray, read: Read) -> Image:
    try:
        image = read(torch.frombuffer(content, dtype=torch.uint8))
    except ValueError as error:
        raise Misfit(f"checkpoint {path} does not fit: {error}", "nothing was loaded") from error
    if image.id != manifest.state:
        raise Misfit(f"checkpoint {path} claims to be of {manifest.state}, and holds {image.id}", "remove it")
    return image


def _lock(path: Path) -> int:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        hint = "give another directory"
        raise CheckpointError(f"cannot write checkpoints to {path}: {error.strerror}", hint) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        hint = "end it, or give another directory"
        raise CheckpointError(f"another process writes checkpoints to {path}", hint) from error
    return lock
