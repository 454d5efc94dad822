"""What `dir`, `help` and `repr` say in an interactive session."""

from __future__ import annotations

import pydoc
import subprocess
import sys

import equipoise.peer


def test_dir_lists_the_public_names_though_they_load_lazily() -> None:
    code = "import equipoise.peer, sys; print(*dir(equipoise.peer)); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed, torch_loaded = done.stdout.splitlines()
    assert set(equipoise.peer.__all__) <= set(listed.split())
    assert torch_loaded == "False"


def test_help_describes_every_public_name() -> None:
    told = pydoc.plain(pydoc.render_doc(equipoise.peer))
    for name in equipoise.peer.__all__:
        assert name in told
        assert getattr(equipoise.peer, name).__doc__
    assert "class Run(" in told
    assert "connect(home" in told
