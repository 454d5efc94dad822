"""Checkpoints beside training: a copy at a step's boundary, a thread that writes it, a word about every failure."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from blake3 import blake3

from equipoise.averaging.state import StateId
from equipoise.peer.config import RESUME_ENV
from equipoise.peer.home import CHECKPOINTS
from equipoise.peer.run import Run
from equipoise.peer.training.checkpoint import CheckpointError, Folder, Found, Read, Subject, folder_name
from equipoise.peer.training.member import Member

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written, how many are kept, where, and whether training starts from one.

    They hold what all peers hold alike. Unless `Options.buffers` is set, that is without BatchNorm's statistics and
    other buffers, which then are each peer's own: to evaluate what a checkpoint holds, compute or save those yourself.

    Attributes:
        every: Epochs from one checkpoint to the next. One is written at the end too, when the run is left: after
            Ctrl-C, say, but not after a SIGTERM that the script does not handle, which ends Python at once.
        keep: How many are kept.
        directory: Where each run has a directory, of one peer alone; by default `checkpoints` in the home.
        resume: Whether to start from the newest sound one; by default what `equipoise launch --resume` says.

    Raises:
        ValueError: A number is out of its range.
    """

    every: int = 10
    keep: int = 3
    directory: str | os.PathLike[str] | None = None
    resume: bool | None = None

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("keep", self.keep)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                told = f"checkpoints: expected {name} to be a whole number of at least 1, got {number!r}"
                raise ValueError(told)

    def open(self, home: str | os.PathLike[str], subject: Subject) -> Recorder:
        """Take the run's directory.

        Raises:
            CheckpointError: It cannot be made, another process writes there, or the home is a temporary one.
        """
        if self.directory is None and not home:
            hint = "give the Peer a home, or Checkpoints a directory"
            raise CheckpointError("cannot write checkpoints to a temporary home", hint)
        parent = Path(home) / CHECKPOINTS if self.directory is None else Path(self.directory)
        resume = os.environ.get(RESUME_ENV) == "1" if self.resume is None else self.resume
        return Recorder(Folder(parent / folder_name(subject.run), subject, self.keep), self.every, resume)


class Recorder:
    """Writes the checkpoints of one run; its methods are called between steps, by one thread.

    Attributes:
        path: The run's directory.
        resume: Whether training is to start from the newest sound one.
        recorded: The state that was written last; None before.
        failure: Why the last attempt to write did not succeed; empty if it did.
        tell: Called with a line about each attempt; from the thread that writes.
    """

    def __init__(self, folder: Folder, every: int, resume: bool) -> None:
        self.path = folder.path
        self.resume = resume
        self.recorded: StateId | None = None
        self.failure = ""
        self.tell: Callable[[str], None] = lambda line: None
        self._folder = folder
        self._every = every
        self._last = 0
        self._late = -1
        self._thread: threading.Thread | None = None

    def restore(self, limit: int, read: Read) -> Found | None:
        """Load the newest sound checkpoint, if training is to resume and there is one; see `Folder.load`.

        Raises:
            CheckpointError: There are checkpoints and none can be used.
        """
        found = self._folder.load(limit, read) if self.resume else None
        furthest = self._folder.furthest
        if not self.resume and furthest is not None:
            self._say(
                logging.WARNING,
                f"training starts anew, though {self.path} holds a checkpoint of epoch {furthest}; "
                "`equipoise launch --resume` would go on from it",
            )
        if found is not None:
            self.recorded = found.manifest.state
            self._last = found.manifest.state.epoch
            self._say(logging.INFO, f"resumed from {found.path}, epoch {self._last}: {found.reason}")
        elif self.resume:
            self._say(logging.INFO, f"nothing to resume from in {self.path}: training starts anew")
        return found

    def due(self, epoch: int) -> bool:
        """Whether the state of this epoch should be recorded; not while an earlier one is being written, but after."""
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
        """Write this state's image from a thread; nobody may change it afterwards.

        Raises:
            RuntimeError: The one before is still being written: `due` was not asked.
        """
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the checkpoint before is still being written; ask `due` first")
        self._last = state.epoch
        self._thread = threading.Thread(target=self._write, args=(state, lambda: image), name="checkpoint")
        self._thread.start()

    def settle(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def finish(self, state: StateId, image: Callable[[], torch.Tensor]) -> None:
        """Write this state too, unless it is on the disk, and wait for it; `image` copies it."""
        self.settle()
        if state != self.recorded:
            self._write(state, image)

    def close(self) -> None:
        """Leave the directory to others; idempotent."""
        self.settle()
        self._folder.close()

    def _write(self, state: StateId, image: Callable[[], torch.Tensor]) -> None:
        try:
            path = self._folder.write(state, image())
        except Exception as error:
            # Training goes on without: whoever watches it reads the log or the status, and the next one is tried.
            self.failure = f"the checkpoint of epoch {state.epoch} could not be written: {error}"
            self._say(logging.ERROR, self.failure)
            return
        self.recorded, self.failure = state, ""
        self._say(logging.INFO, f"epoch {state.epoch} is at {path}")

    def _say(self, level: int, line: str) -> None:
        log.log(level, "%s", line)
        self.tell(line)


class Keeper:
    """Keeps the checkpoints of one replica: starts it from one, if that is wanted, and writes others.

    Attributes:
        recorder: What writes; it knows what was written last, and why the last attempt failed.
        found: What training started from; None if nothing.
    """

    def __init__(self, member: Member, run: Run, checkpoints: Checkpoints) -> None:
        """Take the run's directory, and load the newest sound checkpoint.

        Raises:
            CheckpointError: The directory cannot be used, or what is there is damaged or of something else.
        """
        self._member = member
        self.recorder = checkpoints.open(run.home, subject_of(run))
        self.recorder.tell = partial(run.tell, "checkpoints")
        try:
            self.found = self.recorder.restore(member.limit, member.read)
        except BaseException:
            self.recorder.close()
            raise
        run.before_leaving(self._finish)

    def after_step(self, *_: object) -> None:
        """Write a checkpoint if one is due; called between steps."""
        member = self._member
        if member.whole and self.recorder.due(member.id.epoch):
            self.recorder.record(member.id, member.image())

    def _finish(self) -> None:
        try:
            if self._member.whole:  # Not so where an update was interrupted.
                self.recorder.finish(self._member.id, self._member.image)
        finally:
            self.recorder.close()


def subject_of(run: Run) -> Subject:
    """Whose state the run's checkpoints hold: its terms, and its model."""
    schema = run.schema
    # Of what a checkpoint holds; how tensors travel is no concern of it.
    described = [{"name": one.name, "shape": one.shape, "dtype": one.dtype} for one in schema.tensors]
    layout = blake3(msgspec.json.encode({"tensors": described})).hexdigest()
    model = f"{len(schema.tensors)} tensors, {schema.size} values, layout {layout[:16]}"
    return Subject(run.name, {"model": model, **run.terms})
