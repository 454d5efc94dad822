"""What of a home keeps a daemon from starting, before any process is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from equipoise.dht import identity
from equipoise.peer.config import load
from equipoise.peer.daemon.wiring import reducer_for, start_parts
from equipoise.peer.errors import ConfigError, EquipoiseError, HomeError


def with_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


@pytest.mark.parametrize(("name", "meant"), [("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_device_of_this_machine_reduces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    with_devices(monkeypatch, 2)
    reducer = reducer_for(load({"home": tmp_path, "device": name}, {}))
    assert reducer is not None
    assert str(reducer.device) == meant
    assert reducer_for(load({"home": tmp_path}, {})) is None


def test_a_device_that_this_machine_has_not_is_an_error_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_devices(monkeypatch, 2)
    with pytest.raises(ConfigError) as caught:
        reducer_for(load({"home": tmp_path}, {"EQUIPOISE_DEVICE": "cuda:2"}))
    assert str(caught.value) == (
        "environment EQUIPOISE_DEVICE: expected a device of this machine, got 'cuda:2': torch finds 2 CUDA devices; "
        "look with nvidia-smi, or give cpu"
    )
    assert caught.value.exit_status == 5


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
