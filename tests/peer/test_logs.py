from __future__ import annotations

import logging
from pathlib import Path

from equipoise.peer.logs import MAX_LINE_CHARS, close_log, escaped, open_log

log = logging.getLogger("equipoise.test")


def test_what_moves_a_terminal_is_made_visible() -> None:
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
