"""What of a home keeps a daemon from starting, before any process is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from equipoise.dht import identity
from equipoise.peer.config import load
from equipoise.peer.errors import EquipoiseError, HomeError
from equipoise.peer.wiring import start_parts


async def refusal(home: Path) -> EquipoiseError:
    with pytest.raises(EquipoiseError) as caught:
        await start_parts(load({"home": home}, {}).config)
    return caught.value


async def test_an_identity_that_others_can_read_is_refused_with_the_command_that_helps(
    tmp_path: Path,
) -> None:
    path = identity.load_or_create(tmp_path).path
    path.chmod(0o644)

    error = await refusal(tmp_path)

    assert str(error).endswith(f"mode 0644 lets others use it, expected 0600; run chmod 600 {path}")
    assert (type(error), error.exit_status) == (HomeError, 5)


async def test_a_pipe_in_place_of_the_identity_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / identity.IDENTITY_FILE)

    assert str(await refusal(tmp_path)).endswith(
        "identity.key: expected a regular file; look at it and remove it"
    )


async def test_a_key_that_cannot_be_written_names_the_path_and_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("equipoise.dht.identity.os.fsync", full)

    error = await refusal(tmp_path)

    path = tmp_path / identity.IDENTITY_FILE
    hint = "free some space there, or give another --home"
    assert str(error) == f"cannot use {path}: no space left on device; {hint}"
    assert error.exit_status == 1
    assert os.listdir(tmp_path) == []  # noqa: PTH208, pathlib's is refused in coroutines
