from __future__ import annotations

import logging
import os
import resource
import signal
import stat
from pathlib import Path

import pytest

from equipoise.dht.sanitize import escaped
from equipoise.peer.daemon.logs import MAX_LINE_CHARS, close_log, open_log
from equipoise.peer.errors import HomeError

log = logging.getLogger("equipoise.test")


def test_characters_that_move_a_terminal_are_made_visible() -> None:
    assert escaped("a\x1b[31mb\rc\x00\x9b\u202e") == r"a\x1b[31mb\rc\x00\x9b\u202e"
    assert escaped("é 你 \t") == "é 你 \t"


def test_a_message_is_one_bounded_line(tmp_path: Path) -> None:
    handler = open_log(tmp_path / "daemon.log", "info")
    log.info("peer %s", "evil\n2026-01-01 INFO forged: line\x1b[2J")
    log.info("x" * 1_000_000)
    log.debug("unseen")
    try:
        raise ValueError("bad\x1b")
    except ValueError:
        log.exception("failed")
    close_log(handler)
    log.info("after")

    lines = (tmp_path / "daemon.log").read_text().splitlines()
    assert "evil\\n2026" in lines[0]
    assert "\x1b" not in "".join(lines)
    assert len(lines[1]) < MAX_LINE_CHARS + 20
    assert lines[2].endswith("failed")
    assert lines[-1] == r"ValueError: bad\x1b"


def test_the_log_is_its_users_only_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    path.touch()
    path.chmod(0o644)
    before = os.umask(0)
    try:
        close_log(open_log(path, "info"))
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_is_neither_followed_nor_waited_for(tmp_path: Path, kind: str) -> None:
    precious, path = tmp_path / "precious", tmp_path / "daemon.log"
    precious.write_text("precious")
    path.symlink_to(precious) if kind == "link" else os.mkfifo(path)

    with pytest.raises(HomeError, match=rf"{path}.*; .*look at it and remove it"):
        open_log(path, "info")
    assert precious.read_text() == "precious"


def test_a_log_that_cannot_be_written_is_one_line_until_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "daemon.log"
    handler = open_log(path, "info")
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        log.info("first")
        log.info("second")
        trouble = handler.trouble
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    log.info("third")
    assert handler.trouble == ""
    close_log(handler)

    assert trouble == f"cannot write {path}: file too large; give another --home"
    assert capsys.readouterr().err == f"warning: {trouble}\n"
    assert "third" in path.read_text()
