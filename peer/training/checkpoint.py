"""The checkpoints of one run: a copy at a step's boundary, a thread that writes it, and the directory that keeps them.

Each checkpoint is a directory of an image and a manifest, which is whole or absent. The image is the replicated state
as safetensors. The manifest, JSON, names the training and the image's digest. Both files are written to a directory
beside the final place and flushed; the directory is then renamed, so that a crash at any moment leaves the earlier
checkpoints. A checkpoint is untrusted when it is read: it may have been copied, truncated or edited.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args
from urllib.parse import quote

import msgspec
import numpy as np
import torch
from blake3 import blake3

from equipoise.averaging.metrics import values_of
from equipoise.averaging.state import StateId
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.config import RESUME_ENV
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.home import CHECKPOINTS
from equipoise.peer.training.feedback import Feedback
from equipoise.peer.training.member import Member

FORMAT = 1
"""Version of the format; it grows when an older reader would misread a manifest or an image."""

MANIFEST_FILE = "manifest.json"
IMAGE_FILE = "state.safetensors"
RESIDUAL_FILE = "residual.safetensors"
"""What error feedback keeps: this peer's own, and no part of the state."""

PARTIAL = ".partial-"
"""Prefix of the name of a directory that is being written or removed."""

BEST = "best"
"""Name of the directory of the best checkpoint; no resume starts from it."""

NEW_BEST = ".new-best"
"""Name of a directory that is whole, and is about to take the place of the best one."""

MAX_MANIFEST_BYTES = 64 * 1024
"""Longest manifest that is read: a manifest with all terms of a run at their longest takes 12 kB."""

MAX_SHOWN = 256
"""Most characters of a term that a message shows; agreed terms are no longer than that."""

LOCK_FILE = ".lock"

MAX_FOLDER_CHARS = 120
"""Most characters of a name: file systems allow 255 bytes, and quoting a name in foreign letters grows it ninefold."""

Mode = Literal["max", "min"]
"""Whether the best value of a metric is the highest or the lowest."""

_NAME = re.compile(r"\Aepoch-(\d{12,16})-[0-9a-f]{8}\Z")

ENDS = frozenset({"rounds", "until", "patience"})
"""Terms that say only when a training ends: a state fits a training that goes on for longer."""

log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written, how many are kept, where, and whether training starts from one.

    A checkpoint holds the state that all peers hold alike. Without `Options.buffers`, BatchNorm's statistics and other
    buffers are each peer's own and not in it: to evaluate a checkpoint, compute or save those yourself.

    Attributes:
        every: Epochs from one checkpoint to the next. Another is written when the run is left: after Ctrl-C, for
            example, but not after a SIGTERM that the script does not handle, which ends Python at once.
        keep: Number of checkpoints to keep.
        directory: Parent of the runs' directories, for one peer alone; by default `checkpoints` in the home.
        resume: Whether to start from the newest sound checkpoint; by default as `equipoise launch --resume` says.
        best: Name of a metric: the checkpoint with the best value of it is kept as well, in the directory `best` beside
            the others. Only trainers that evaluate the agreed model know one, as `Federated` does. Empty: none is kept.
        mode: The best value is the highest by `max`, the lowest by `min`, whatever the metric's name.

    Raises:
        ValueError: A number or `mode` is out of its range, or `best` is no name of a metric.
    """

    every: int = 10
    keep: int = 3
    directory: str | os.PathLike[str] | None = None
    resume: bool | None = None
    best: str = ""
    mode: Mode = "max"

    def __post_init__(self) -> None:
        if self.best:
            values_of({self.best: 0.0})
        if self.mode not in get_args(Mode):
            raise ValueError(f"checkpoints: expected mode to be 'max' or 'min', got {self.mode!r}")
        for name, number in (("every", self.every), ("keep", self.keep)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                told = f"checkpoints: expected {name} to be a whole number of at least 1, got {number!r}"
                raise ValueError(told)


class Keeper:
    """Writes the checkpoints of one replica to one directory, which this process alone writes until `close`.

    Its methods are called between steps, by one thread.

    Attributes:
        path: The run's directory.
        resume: Whether training starts from the newest sound checkpoint.
        recorded: The state that was written last; None before.
        tell: Called with a line about each attempt, from the thread that writes.
    """

    def __init__(
        self,
        member: Member,
        path: Path,
        subject: Subject,
        options: Checkpoints,
        resume: bool,
        residual: Feedback | None = None,
    ) -> None:
        """Make the directory `path` if need be, and lock it; nothing else should be kept in it.

        The last `options.keep` checkpoints of `subject` stay, and the checkpoint of the highest epoch.

        Raises:
            CheckpointError: The directory cannot be made, or another process writes there.
        """
        self.path = path
        self.resume = resume
        self.recorded: StateId | None = None
        self.tell: Callable[[str], None] = lambda line: None
        self._member = member
        self._residual = residual
        self._subject = subject
        self._every, self._keep = options.every, options.keep
        self._metric, self._mode = options.best, options.mode
        self._damaged: set[Path] = set()
        self._last = 0
        self._late = -1
        self._thread: threading.Thread | None = None
        self._held: tuple[StateId, torch.Tensor] | None = None
        self._best_thread: threading.Thread | None = None
        self._lock = _lock(path)
        for left in path.glob(PARTIAL + "*"):
            shutil.rmtree(left, ignore_errors=True)  # Tried again at the next start.
        self._put_best()
        self._best = self._best_so_far() if self._metric else None

    def restore(self) -> None:
        """Load the newest sound checkpoint, if training is to resume and there is one; see `load`.

        Raises:
            CheckpointError: There are checkpoints, but none can be used.
        """
        found = self.load() if self.resume else None
        listed = self._listed()
        if not self.resume and listed:
            self._say(
                logging.WARNING,
                f"training starts anew, though {self.path} holds a checkpoint of epoch {listed[0][0]}; "
                "`equipoise launch --resume` would go on from it",
            )
        if found is not None:
            self.recorded, origin = found
            self._last = self.recorded.epoch
            self._say(logging.INFO, f"resumed from {origin}")
        elif self.resume:
            self._say(logging.INFO, f"nothing to resume from in {self.path}: training starts anew")

    def load(self) -> tuple[StateId, str] | None:
        """Load the newest checkpoint that is sound into the replica, if there is one.

        Returns:
            The state, and its origin: the directory, the newer checkpoints that were passed over, the fault of each.

        Raises:
            Misfit: A checkpoint is of another run, model or terms. It is not passed over: resuming here is a mistake.
            Damaged: There are checkpoints, but none can be read; names the fault of the newest.
        """
        passed: list[str] = []
        for _, path in self._listed():
            try:
                manifest, content = read_checkpoint(path, self._subject, self._member.limit)
            except Damaged as error:
                passed.append(str(error))
                self._damaged.add(path)
                continue
            try:
                image = self._member.read(torch.frombuffer(content, dtype=torch.uint8))
            except ValueError as error:
                raise Misfit(f"checkpoint {path} does not fit: {error}", "nothing was loaded") from error
            if image.id != manifest.state:
                told = f"checkpoint {path} claims to be of {manifest.state}, and holds {image.id}"
                raise Misfit(told, "remove it")
            image.load()
            self._load_residual(path, manifest.state)
            why = f"the newest that is sound; passed over: {'; '.join(passed)}" if passed else "the newest"
            return manifest.state, f"{path}, epoch {manifest.state.epoch}: {why}"
        if not passed:
            return None
        older = f" ({len(passed) - 1} older ones are no better)" if passed[1:] else ""
        raise Damaged(passed[0] + older, f"remove {self.path} to start anew")

    def _load_residual(self, path: Path, state: StateId) -> None:
        if self._residual is None:
            return
        try:
            why = self._residual.load(_content(path / RESIDUAL_FILE, self._member.limit), state)
        except Damaged as error:
            why = str(error)
        if why:
            self._say(logging.WARNING, f"the residual of error feedback starts at 0, not from {path}: {why}")

    def __call__(self, *_: object) -> None:
        """Write a checkpoint of the replica's state, if one is due; call it after each step, and once before the first.

        Where the best one is kept, the state's image is held until the next call: its score comes later.
        """
        member = self._member
        due = member.whole and self.due(member.id.epoch)
        image = member.image() if due or (member.whole and self._metric) else None
        if image is not None and due:
            self.record(member.id, image)
        self._held = (member.id, image) if image is not None and self._metric else None

    def score(self, state: StateId, evaluation: Mapping[str, float]) -> None:
        """Note the group's evaluation of a state, as `Outcome.state` and `Outcome.evaluation` tell it.

        If its value of the metric is better than all values before, a thread writes the state as the best one. Call
        this before the call between steps that follows: only the state of the last such call is still held here.
        """
        value, before = evaluation.get(self._metric), self._best
        if self._held is None or self._held[0] != state or value is None:
            return
        if before is not None and (value <= before if self._mode == "max" else value >= before):
            return
        if self._best_thread is not None:
            self._best_thread.join()
        self._best = value
        self._best_thread = threading.Thread(
            target=self._write_best, args=(*self._held, value), name="best checkpoint"
        )
        self._best_thread.start()

    def due(self, epoch: int) -> bool:
        """Return whether to record the state of this epoch; False while an earlier state is being written."""
        if epoch // self._every == self._last // self._every:
            return False
        if self._thread is None or not self._thread.is_alive():
            return True
        if self._late != self._last:
            self._late = self._last
            self._say(
                logging.WARNING,
                f"the checkpoint of epoch {epoch} is late: the one of epoch {self._last} is still being written; "
                f"a faster disk or a larger `every` than {self._every} would help",
            )
        return False

    def record(self, state: StateId, image: torch.Tensor) -> None:
        """Write this state's image in a thread, if one is `due`; the caller must not change the image afterwards."""
        self._last = state.epoch
        args = state, lambda: image, self._own_files(state)
        self._thread = threading.Thread(target=self._write, args=args, name="checkpoint")
        self._thread.start()

    def settle(self) -> None:
        """Wait until the threads have written their checkpoints."""
        for thread in (self._thread, self._best_thread):
            if thread is not None:
                thread.join()

    def finish(self) -> None:
        """Write the replica's state too, unless it is on the disk, and close; an interrupted update leaves no state."""
        with contextlib.closing(self):
            self.settle()
            if self._member.whole and self._member.id != self.recorded:
                self._write(self._member.id, self._member.image, self._own_files(self._member.id))

    def close(self) -> None:
        """Let other processes write to the directory; idempotent."""
        self.settle()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _own_files(self, state: StateId) -> dict[str, torch.Tensor]:
        return {} if self._residual is None else {RESIDUAL_FILE: self._residual.image(state)}

    def _write(
        self,
        state: StateId,
        image: Callable[[], torch.Tensor],
        own: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Write a checkpoint, an image u8 [bytes] on the CPU; remove those that are too many."""
        path = self.path / f"epoch-{state.epoch:012d}-{secrets.token_hex(4)}"
        try:
            beside = {name: content.numpy().data for name, content in own.items()}
            write_checkpoint(path, self._subject, state, image().numpy().data, {}, beside)
            self._prune(path)
        except Exception as error:
            # Training goes on, and tries the next checkpoint.
            self._say(logging.ERROR, f"the checkpoint of epoch {state.epoch} could not be written: {error}")
            return
        self.recorded = state
        self._say(logging.INFO, f"epoch {state.epoch} is at {path}")

    def _write_best(self, state: StateId, image: torch.Tensor, value: float) -> None:
        """Write the best checkpoint so far, in place of the one before."""
        named = f"with the {'highest' if self._mode == 'max' else 'lowest'} {self._metric} so far, {value:g}"
        new = self.path / NEW_BEST
        try:
            write_checkpoint(new, self._subject, state, image.numpy().data, {self._metric: value})
            self._put_best()
        except Exception as error:
            self._say(logging.ERROR, f"epoch {state.epoch}, {named}, could not be written: {error}")
            return
        self._say(logging.INFO, f"epoch {state.epoch}, {named}, is at {self.path / BEST}")

    def _best_so_far(self) -> float | None:
        """Value of the metric of the best checkpoint that is there; None without one of this training.

        It counts for a training that starts anew, too: a user may have forgotten to resume.
        """
        with contextlib.suppress(Damaged):
            manifest = read_manifest(self.path / BEST)
            return manifest.scores.get(self._metric) if manifest.subject == self._subject else None
        return None

    def _put_best(self) -> None:
        """Put a new best checkpoint, which is whole, into its place; after a crash the next start does."""
        new, best = self.path / NEW_BEST, self.path / BEST
        if new.exists():
            if best.exists():
                self._remove(best)
            new.rename(best)

    def _listed(self) -> list[tuple[int, Path]]:
        """Epochs and directories of all checkpoints, sound or not, the newest first."""
        found = [(_NAME.match(path.name), path) for path in self.path.iterdir()]
        return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)

    def _prune(self, latest: Path) -> None:
        """Keep the checkpoints written last, and the one of the highest epoch: a user may have forgotten to resume."""
        sound = [path for _, path in self._listed() if path not in self._damaged]
        written = sorted(sound, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        kept = {latest, *sound[:1], *written[: self._keep]}
        for _, path in self._listed():
            if path not in kept:
                self._remove(path)
        self._damaged.clear()

    def _remove(self, path: Path) -> None:
        # A half-removed checkpoint must not be taken for a damaged one.
        gone = path.rename(path.with_name(PARTIAL + path.name))
        shutil.rmtree(gone, ignore_errors=True)

    def _say(self, level: int, line: str) -> None:
        log.log(level, "%s", line)
        self.tell(line)


def keep_checkpoints(
    member: Member,
    run: JoinedRun,
    checkpoints: Checkpoints,
    scores: bool = False,
    residual: Feedback | None = None,
) -> Keeper:
    """Start a replica from its newest sound checkpoint, if it should resume, and write others until the run is left.

    Args:
        residual: Error feedback, which lies in the checkpoints too.
        scores: Whether the caller will tell the keeper how states are evaluated, which `Checkpoints.best` needs.

    Returns:
        To be called between steps; it writes a checkpoint if one is due.

    Raises:
        CheckpointError: The directory cannot be used, or the home is temporary; or the checkpoints are damaged or of
            another training.
        ValueError: The best checkpoint is to be kept, and the caller has no scores.
    """
    if checkpoints.best and not scores:
        raise ValueError(
            f"checkpoints: best={checkpoints.best!r} needs a trainer that evaluates the model, as Federated does"
        )
    home = run.core.link.welcome.home
    if checkpoints.directory is None and not home:
        hint = "give the Peer a home, or Checkpoints a directory"
        raise CheckpointError("cannot write checkpoints to a temporary home", hint)
    parent = Path(home) / CHECKPOINTS if checkpoints.directory is None else Path(checkpoints.directory)
    resume = os.environ.get(RESUME_ENV) == "1" if checkpoints.resume is None else checkpoints.resume
    keeper = Keeper(member, parent / folder_name(run.name), subject_of(run), checkpoints, resume, residual)
    keeper.tell = partial(run.core.tell, "checkpoints")
    try:
        keeper.restore()
    except BaseException:
        keeper.close()
        raise
    run.core.finishing.append(keeper.finish)
    return keeper


def subject_of(run: JoinedRun) -> Subject:
    """The subject of the run's checkpoints: its model, and its terms, but for `ENDS`."""
    schema = run.core.binding.steps.layout.schema
    # A checkpoint depends on nothing else of the tensors, such as the way in which they travel.
    described = [{"name": one.name, "shape": one.shape, "dtype": one.dtype} for one in schema.tensors]
    layout = blake3(msgspec.json.encode({"tensors": described})).hexdigest()
    model = f"{len(schema.tensors)} tensors, {schema.size} values, layout {layout[:16]}"
    terms = {name: value for name, value in run.terms.items() if name not in ENDS}
    return Subject(run.name, {"model": model, **terms})


def folder_name(run: str) -> str:
    """A file name for the run, different for each run."""
    name = quote(run, safe=" ").replace(".", "%2E")
    if len(name) <= MAX_FOLDER_CHARS:
        return name
    return f"{name[:MAX_FOLDER_CHARS]}-{blake3(run.encode()).hexdigest()[:16]}"


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
    image = _content(path / IMAGE_FILE, manifest.size)
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
    content = _content(path / MANIFEST_FILE, MAX_MANIFEST_BYTES)
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


def _content(path: Path, limit: int) -> memoryview:
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
