"""One checkpoint on disk: a directory of an image and a manifest, which is whole or not there.

The image is the replicated state as safetensors; the manifest, JSON, says whose state it is and which digest the image
must have. Both are written beside their place, flushed, and renamed into it, so that a crash at any moment leaves what
was there before. What is read back is untrusted: somebody may have copied, truncated or edited it.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from equipoise.averaging.state import StateId
from equipoise.peer.errors import EquipoiseError

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
        _write(partial / MANIFEST_FILE, memoryview(_json(manifest)))
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
        raise Damaged(
            f"checkpoint {path} is truncated: {IMAGE_FILE} has {len(image)} bytes of {manifest.size}"
        )
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
    raise Damaged(
        f"checkpoint {path} is of format {version}; this version of equipoise reads format {FORMAT}",
        "upgrade equipoise" if version > FORMAT else "write a new one",
    )


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


def _json(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def _write(path: Path, content: memoryview) -> tuple[int, str]:
    """Write a new file down to the disk; returns its length and its BLAKE3."""
    hasher = blake3()
    with path.open("xb", buffering=0) as file:
        for chunk in _chunks(content):
            hasher.update(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return len(content), hasher.hexdigest()


def _chunks(content: memoryview) -> Iterator[memoryview]:
    return (content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES))


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
