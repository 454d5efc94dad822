"""The daemon's log: a bounded file in its home, one line per event, safe to print on a terminal."""

from __future__ import annotations

import logging
import logging.handlers
import re
from pathlib import Path

MAX_LOG_BYTES = 2 * 1024 * 1024
"""Some days of a quiet daemon; with the older files 8 MiB at most."""

OLDER_FILES = 3

MAX_LINE_CHARS = 8192
"""A traceback of 60 frames; nothing that a peer says may fill the file."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """`text` with what moves a terminal's cursor, its colours or its writing direction made visible."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


class LineFormatter(logging.Formatter):
    """Formats records as one bounded, escaped line; only tracebacks have more."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the base class's name
        """The first line: no newline in a message may pass for a record of its own."""
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        text = escaped(super().format(record))
        return text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + "... (cut)"


def open_log(path: Path, level: str) -> logging.Handler:
    """Log all of equipoise to `path` from now on, until `close_log`."""
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=OLDER_FILES)
    handler.setFormatter(LineFormatter())
    handler.setLevel(level.upper())
    logger = logging.getLogger("equipoise")
    logger.addHandler(handler)
    logger.setLevel(min(logger.level or handler.level, handler.level))
    return handler


def close_log(handler: logging.Handler) -> None:
    """Stop logging there."""
    logging.getLogger("equipoise").removeHandler(handler)
    handler.close()
