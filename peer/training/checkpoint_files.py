"""The files of a checkpoint: a directory of an image and a manifest, which is whole or absent.

The image is the replicated state as safetensors. The manifest, JSON, names the training and the image's digest. Both
are written to a directory beside the final place and flushed; the directory is then renamed, so that a crash at any
moment leaves the earlier checkpoints. A checkpoint is untrusted when it is read: it may have been copied, truncated or
edited.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from blake3 import blake3

from equipoise.averaging.state import StateId
from equipoise.peer.errors import EquipoiseError

FORMAT = 1
"""Version of the format; it grows when an older reader would misread a manifest or an image."""

MANIFEST_FILE = "manifest.json"
IMAGE_FILE = "state.safetensors"
RESIDUAL_FILE = "residual.safetensors"
"""What error feedback keeps: this peer's own, and no part of the state."""

PARTIAL = ".partial-"
"""Prefix of the name of a directory that is being written or removed."""

MAX_MANIFEST_BYTES = 64 * 1024
"""Longest manifest that is read: a manifest with all terms of a run at their longest takes 12 kB."""

MAX_SHOWN = 256
"""Most characters of a term that a message shows; agreed terms are no longer than that."""

LOCK_FILE = ".lock"


class CheckpointError(EquipoiseError, ValueError):
    """A checkpoint cannot be written, or cannot be used here; nothing was loaded."""


class Damaged(CheckpointError):
    """The checkpoint cannot be read; an older one may be sound."""


class Misfit(CheckpointError):
    """The checkpoint is sound, but of another run, another model or other terms."""


class Subject(msgspec.Struct, frozen=True):
    """The training whose state a checkpoint holds.

    Attributes:
        run: The run's name.
        terms: Values that must be equal for the state to fit: the model, the optimizer, the target batch size, ...
            Codec, group size and protocol are not among them: they may change between two starts.
    """

    run: str
    terms: dict[str, str]

    @property
    def spec(self) -> str:
        """BLAKE3 in hex of the subject; equal hashes fit."""
        return blake3(msgspec.json.encode((self.run, sorted(self.terms.items())))).hexdigest()


class Manifest(msgspec.Struct, frozen=True):
    """The description of an image, for a reader that has not read it.

    Attributes:
        format: `FORMAT` of the program that wrote it.
        subject: The training whose state it is.
        spec: The subject's hash.
        state: Epoch and lineage.
        size: Length of the image in bytes.
        digest: BLAKE3 of the image, 64 hexadecimal characters.
        scores: Of the best checkpoint, its value of the metric by which it is the best; empty of others.
    """

    format: int
    subject: Subject
    spec: str
    state: StateId
    size: int
    digest: str
    scores: dict[str, float] = {}


def write_checkpoint(
    path: Path,
    subject: Subject,
    state: StateId,
    image: memoryview,
    scores: Mapping[str, float] = MappingProxyType({}),
    beside: Mapping[str, memoryview] = MappingProxyType({}),
) -> None:
    """Write a checkpoint as the new directory `path`, with the files `beside` it.

    Raises:
        OSError: The disk is full, say; nothing is at `path`.
    """
    partial = path.with_name(PARTIAL + path.name)
    try:
        partial.mkdir(mode=0o700)
        digest = _write(partial / IMAGE_FILE, image)
        manifest = Manifest(FORMAT, subject, subject.spec, state, len(image), digest, dict(scores))
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
        _write(partial / MANIFEST_FILE, memoryview(text))
        for name, content in beside.items():
            _write(partial / name, content)
        _flush(partial)
        partial.rename(path)
        _flush(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, which is never half there: that would be taken for a damaged one."""
    gone = path.rename(path.with_name(PARTIAL + path.name))
    shutil.rmtree(gone, ignore_errors=True)


def read_checkpoint(path: Path, own: Subject, limit: int) -> tuple[Manifest, memoryview]:
    """Read the manifest and the image, of at most `limit` bytes, of a checkpoint of `own`, and verify all of it.

    Raises:
        Misfit: It is of another run, model or terms.
        Damaged: The checkpoint cannot be read; names the fault.
    """
    manifest = read_manifest(path)
    if manifest.spec != manifest.subject.spec:
        raise Damaged(f"checkpoint {path} is damaged: {MANIFEST_FILE} does not agree with its own hash")
    _require_fit(path, manifest.subject, own)
    if manifest.size > limit:
        raise Misfit(
            f"checkpoint {path} has an image of {manifest.size} bytes; expected at most {limit} for this model",
            "give the directory of this run",
        )
    image = content_of(path / IMAGE_FILE, manifest.size)
    if len(image) < manifest.size:
        got = f"{len(image)} bytes of {manifest.size}"
        raise Damaged(f"checkpoint {path} is truncated: {IMAGE_FILE} has {got}")
    if len(image) > manifest.size:
        raise Damaged(f"checkpoint {path} is damaged: {IMAGE_FILE} has more than {manifest.size} bytes")
    digest = blake3(image).hexdigest()
    if digest != manifest.digest:
        raise Damaged(
            f"checkpoint {path} is damaged: {IMAGE_FILE} has digest {digest[:16]}, not {manifest.digest[:16]}"
        )
    return manifest, image


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in the directory `path`; does not read the image.

    Raises:
        Damaged: The manifest is missing or malformed, or a newer program wrote it.
    """
    content = content_of(path / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    try:
        version = _versions.decode(content).format
        if version == FORMAT:
            return _manifests.decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {MANIFEST_FILE}: {error}") from error
    told = f"checkpoint {path} is of format {version}; this version of equipoise reads format {FORMAT}"
    raise Damaged(told, "upgrade equipoise" if version > FORMAT else "write a new one")


class _Version(msgspec.Struct):
    format: int


_versions = msgspec.json.Decoder(_Version)
_manifests = msgspec.json.Decoder(Manifest)


def _require_fit(path: Path, found: Subject, own: Subject) -> None:
    """Raise `Misfit` if a checkpoint of `found` is unusable for `own`."""
    if found.run != own.run:
        told = f"checkpoint {path} is of run {found.run!r}, not of {own.run!r}"
        raise Misfit(told, "give the directory of this run")
    for term in sorted(found.terms.keys() | own.terms.keys()):
        there, here = found.terms.get(term, "not set"), own.terms.get(term, "not set")
        if there != here:
            told = f"another {term}: {there[:MAX_SHOWN]!r} there, {here[:MAX_SHOWN]!r} here"
            hint = "resume with the same, or give the run a new name"
            raise Misfit(f"checkpoint {path} was written with {told}", hint)


def _write(path: Path, content: memoryview) -> str:
    """Write a new file down to the disk; returns its BLAKE3."""
    with path.open("xb", buffering=0) as file:
        left = content
        while left:
            left = left[file.write(left) :]
        digest = blake3(content).hexdigest()  # While the system writes to the disk.
        os.fsync(file.fileno())
    return digest


def _flush(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def content_of(path: Path, limit: int) -> memoryview:
    """All of a file, or its first `limit` + 1 bytes; a link, a pipe or a device is not followed.

    Raises:
        Damaged: The file is missing, is no regular file, or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Damaged(f"checkpoint {path.parent} is damaged: {path.name} is not a file")
            return np.fromfile(file, np.uint8, min(os.fstat(handle).st_size, limit + 1)).data
    except OSError as error:
        raise Damaged(f"checkpoint {path.parent} is damaged: {path.name}: {error.strerror}") from error


def lock(path: Path) -> int:
    """Make the directory of a run, and take it for this process alone; returns the open lock.

    Raises:
        CheckpointError: It cannot be made, or another process writes there.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        hint = "give another directory"
        raise CheckpointError(f"cannot write checkpoints to {path}: {error.strerror}", hint) from error
    try:
        fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(taken)
        hint = "end it, or give another directory"
        raise CheckpointError(f"another process writes checkpoints to {path}", hint) from error
    return taken
