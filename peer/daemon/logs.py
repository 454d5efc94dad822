"""The daemon's log: a bounded file in its home, one line per event, safe to print on a terminal."""

from __future__ import annotations

import io
import logging
import logging.handlers
import os
import stat
import sys
from pathlib import Path

from equipoise.dht.sanitize import escaped
from equipoise.peer.errors import HomeError, unusable

MAX_LOG_BYTES = 2 * 1024 * 1024
"""Some days of a quiet daemon; with the older files 8 MiB at most."""

OLDER_FILES = 3

MAX_LINE_CHARS = 8192
"""A traceback of 60 frames; nothing that a peer says may fill the file."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class PrivateFileHandler(logging.handlers.RotatingFileHandler):
    """Appends to a bounded file that only its user may read, and that is never a link or a pipe.

    A file that cannot be written (a full disk) is reported by one line on standard error until it can be written again.
    """

    def __init__(self, path: Path, max_bytes: int, older_files: int) -> None:
        """Open the file.

        Raises:
            HomeError: Something else is in its place, or it cannot be written.
        """
        self._error: OSError | None = None
        self._reported = False
        try:
            super().__init__(path, maxBytes=max_bytes, backupCount=older_files, encoding="utf-8")
        except OSError as error:
            raise unusable(f"write {path}", error) from error

    @property
    def trouble(self) -> str:
        """Why the last record could not be written, and what to do; empty if it was."""
        return str(unusable(f"write {self.baseFilename}", self._error)) if self._error is not None else ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        self._error = None
        super().emit(record)
        self._report()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, the base class's name
        """Remember that the file cannot be written; any other error is a mistake in the program."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._error = error
        else:
            super().handleError(record)

    def close(self) -> None:
        """Write what is left, and close the file."""
        try:
            super().close()
        except OSError as error:
            self._error = error
            self._report()

    def _report(self) -> None:
        if self._error is not None and not self._reported:
            print(f"warning: {self.trouble}", file=sys.stderr, flush=True)
        self._reported = self._error is not None

    def _open(self) -> io.TextIOWrapper:
        # The base class would follow a symbolic link, wait for the reader of a pipe, and leave the mode to the umask.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.baseFilename, flags, 0o600)
        file = os.fdopen(descriptor, "a", encoding=self.encoding)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise HomeError(f"{self.baseFilename} is not a regular file", "look at it and remove it")
        os.fchmod(descriptor, 0o600)
        return file


class LineFormatter(logging.Formatter):
    """Formats records as one bounded, escaped line; only tracebacks have more."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the base class's name
        """The first line: no newline in a message may pass for a record of its own."""
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        text = escaped(super().format(record))
        return text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + "... (cut)"


def open_log(path: Path, level: str) -> PrivateFileHandler:
    """Log all of equipoise to `path` from now on, until `close_log`."""
    handler = PrivateFileHandler(path, MAX_LOG_BYTES, OLDER_FILES)
    handler.setFormatter(LineFormatter(FORMAT))
    handler.setLevel(level.upper())
    logger = logging.getLogger("equipoise")
    logger.addHandler(handler)
    logger.setLevel(min(logger.level or handler.level, handler.level))
    return handler


def close_log(handler: logging.Handler) -> None:
    """Stop logging there."""
    logging.getLogger("equipoise").removeHandler(handler)
    handler.close()
