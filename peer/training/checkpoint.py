"""The checkpoints of one run: a copy at a step's boundary, a thread that writes it, and the directory of them all."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args
from urllib.parse import quote

import msgspec
import torch
from blake3 import blake3

from equipoise.averaging.metrics import values_of
from equipoise.averaging.state import StateId
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.config import RESUME_ENV
from equipoise.peer.home import CHECKPOINTS
from equipoise.peer.training.checkpoint_files import (
    PARTIAL,
    RESIDUAL_FILE,
    CheckpointError,
    Damaged,
    Misfit,
    Subject,
    content_of,
    lock,
    read_checkpoint,
    read_manifest,
    remove_checkpoint,
    write_checkpoint,
)
from equipoise.peer.training.feedback import Feedback
from equipoise.peer.training.member import Member

MAX_FOLDER_CHARS = 120
"""Most characters of a name: file systems allow 255 bytes, and quoting a name in foreign letters grows it ninefold."""

_NAME = re.compile(r"\Aepoch-(\d{12,16})-[0-9a-f]{8}\Z")

ENDS = frozenset({"rounds", "until", "patience"})
"""Terms that say only when a training ends: a state fits a training that goes on for longer."""

log = logging.getLogger(__name__)


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


NOTHING_RESUMES = (
    "launch --resume changes nothing: this training writes no checkpoints; give it checkpoints=Checkpoints()"
)

BEST = "best"
"""Name of the directory of the best checkpoint; no resume starts from it."""

NEW_BEST = ".new-best"
"""Name of a directory that is whole, and is about to take the place of the best one."""

Mode = Literal["max", "min"]
"""Whether the best value of a metric is the highest or the lowest."""


class Best:
    """Keeps one checkpoint beside the others of its directory: that of the state with the best value of a metric.

    Attributes:
        metric: The metric's name; empty if no checkpoint is the best.
    """

    def __init__(
        self, path: Path, subject: Subject, metric: str, mode: Mode, say: Callable[[int, str], None]
    ) -> None:
        """`path` is the run's directory; `say` takes the level and the text of a line of the log."""
        self.metric = metric
        self._path = path
        self._subject = subject
        self._mode = mode
        self._say = say
        self._held: tuple[StateId, torch.Tensor] | None = None
        self._thread: threading.Thread | None = None
        self._put_best()
        self._best = self._best_so_far() if metric else None

    def hold(self, held: tuple[StateId, torch.Tensor] | None) -> None:
        """Hold a state's image, u8 [bytes], until the next call: its score comes later."""
        self._held = held if self.metric else None

    def settle(self) -> None:
        """Wait until the thread has written its checkpoint."""
        if self._thread is not None:
            self._thread.join()

    def score(self, state: StateId, evaluation: Mapping[str, float]) -> None:
        """Note the group's evaluation of a state, as `Outcome.state` and `Outcome.evaluation` tell it.

        If its value of the metric is better than all values before, a thread writes the state as the best one. Call
        this before the call between steps that follows: only the state of the last such call is still held here.
        """
        value, before = evaluation.get(self.metric), self._best
        if self._held is None or self._held[0] != state or value is None:
            return
        if before is not None and (value <= before if self._mode == "max" else value >= before):
            return
        self.settle()
        self._best = value
        self._thread = threading.Thread(
            target=self._write_best, args=(*self._held, value), name="best checkpoint"
        )
        self._thread.start()

    def _write_best(self, state: StateId, image: torch.Tensor, value: float) -> None:
        """Write the best checkpoint so far, in place of the one before."""
        named = f"with the {'highest' if self._mode == 'max' else 'lowest'} {self.metric} so far, {value:g}"
        new = self._path / NEW_BEST
        try:
            write_checkpoint(new, self._subject, state, image.numpy().data, {self.metric: value})
            self._put_best()
        except Exception as error:
            self._say(logging.ERROR, f"epoch {state.epoch}, {named}, could not be written: {error}")
            return
        self._say(logging.INFO, f"epoch {state.epoch}, {named}, is at {self._path / BEST}")

    def _best_so_far(self) -> float | None:
        """Value of the metric of the best checkpoint that is there; None without one of this training.

        It counts for a training that starts anew, too: a user may have forgotten to resume.
        """
        with contextlib.suppress(Damaged):
            manifest = read_manifest(self._path / BEST)
            return manifest.scores.get(self.metric) if manifest.subject == self._subject else None
        return None

    def _put_best(self) -> None:
        """Put a new best checkpoint, which is whole, into its place; after a crash the next start does."""
        new, best = self._path / NEW_BEST, self._path / BEST
        if new.exists():
            if best.exists():
                remove_checkpoint(best)
            new.rename(best)


class Keeper:
    """Writes the checkpoints of one replica to one directory, which this process alone writes until `close`.

    Its methods are called between steps, by one thread.

    Attributes:
        path: The run's directory.
        resume: Whether training starts from the newest sound checkpoint.
        best: Keeps the best checkpoint; it must be told the scores.
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
        self._damaged: set[Path] = set()
        self._last = 0
        self._late = -1
        self._thread: threading.Thread | None = None
        self._lock = lock(path)
        for left in path.glob(PARTIAL + "*"):
            shutil.rmtree(left, ignore_errors=True)  # Tried again at the next start.
        self.best = Best(path, subject, options.best, options.mode, self._say)

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
            why = self._residual.load(content_of(path / RESIDUAL_FILE, self._member.limit), state)
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
        image = member.image() if due or (member.whole and self.best.metric) else None
        if image is not None and due:
            self.record(member.id, image)
        self.best.hold(None if image is None else (member.id, image))

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
        if self._thread is not None:
            self._thread.join()
        self.best.settle()

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
                remove_checkpoint(path)
        self._damaged.clear()

    def _say(self, level: int, line: str) -> None:
        log.log(level, "%s", line)
        self.tell(line)


def keep_checkpoints(
    member: Member,
    run: JoinedRun,
    checkpoints: Checkpoints | None,
    scores: bool = False,
    residual: Feedback | None = None,
) -> Keeper | None:
    """Start a replica from its newest sound checkpoint, if it should resume, and write others until the run is left.

    Args:
        checkpoints: The script's wishes. None: no checkpoints, and a warning if the script was to resume.
        residual: Error feedback, which lies in the checkpoints too.
        scores: Whether the caller will tell the keeper how states are evaluated, which `Checkpoints.best` needs.

    Returns:
        To be called between steps; it writes a checkpoint if one is due. None without checkpoints.

    Raises:
        CheckpointError: The directory cannot be used, or the home is temporary; or the checkpoints are damaged or of
            another training.
        ValueError: The best checkpoint is to be kept, and the caller has no scores.
    """
    resuming = os.environ.get(RESUME_ENV) == "1"
    if checkpoints is None:
        if resuming:
            log.warning("run %s: %s", run.name, NOTHING_RESUMES)
            run.core.tell("checkpoints", NOTHING_RESUMES)
        return None
    if checkpoints.best and not scores:
        raise ValueError(
            f"checkpoints: best={checkpoints.best!r} needs a trainer that evaluates the model, as Federated does"
        )
    home = run.core.link.welcome.home
    if checkpoints.directory is None and not home:
        hint = "give the Peer a home, or Checkpoints a directory"
        raise CheckpointError("cannot write checkpoints to a temporary home", hint)
    parent = Path(home) / CHECKPOINTS if checkpoints.directory is None else Path(checkpoints.directory)
    resume = resuming if checkpoints.resume is None else checkpoints.resume
    keeper = Keeper(member, parent / folder_name(run.name), subject_of(run), checkpoints, resume, residual)
    keeper.tell = partial(run.core.tell, "checkpoints")
    try:
        keeper.restore()
    except BaseException:
        keeper.close()
        raise
    run.core.loop.finishing.append(keeper.finish)
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
