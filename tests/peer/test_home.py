from __future__ import annotations

import concurrent.futures
import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from equipoise.peer.errors import HomeBusy, HomeError, NoDaemon
from equipoise.peer.home import PID_FILE, SOCKET_FILE, Home, connect_socket, wait_until_free


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_only_the_user_gets_in_whatever_the_umask(tmp_path: Path) -> None:
    home = Home.take(tmp_path / "deep" / "home")
    with home.listen():
        assert mode(home.path) == 0o700
        assert mode(home.path / SOCKET_FILE) == 0o600
        assert mode(home.path / PID_FILE) == 0o600
    home.release()


def test_a_second_daemon_is_told_of_the_first(tmp_path: Path) -> None:
    home = Home.take(tmp_path)

    with pytest.raises(HomeBusy, match=rf"\(pid {os.getpid()}\) is already running.*close\(\) this script's"):
        Home.take(tmp_path)
    assert not wait_until_free(tmp_path, 0.0)
    home.release()
    home.release()
    assert wait_until_free(tmp_path, 0.0)
    assert [file.name for file in tmp_path.iterdir()] == [PID_FILE]
    Home.take(tmp_path).release()


def test_a_start_on_a_full_disk_leaves_no_empty_pid_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(HomeError, match="free some space there"):
            Home.take(tmp_path)

    assert list(tmp_path.iterdir()) == []
    Home.take(tmp_path).release()


def test_a_pid_file_that_a_failed_start_removed_meanwhile_is_not_locked_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    removed: list[bool] = []

    def removing(descriptor: int, how: int) -> None:
        lock(descriptor, how)
        if not removed:
            (tmp_path / PID_FILE).unlink()
            removed.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", removing)
        home = Home.take(tmp_path)

    with pytest.raises(HomeBusy):
        Home.take(tmp_path)
    home.release()


def test_a_killed_daemon_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from equipoise.peer.home import Home;"
        "home = Home.take(pathlib.Path(sys.argv[1])); listener = home.listen(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert (tmp_path / SOCKET_FILE).exists()
    with pytest.raises(NoDaemon, match="equipoise daemon --home"):
        connect_socket(tmp_path, 1.0)

    home = Home.take(tmp_path)
    with home.listen():
        connect_socket(tmp_path, 1.0).close()
    home.release()


def test_a_file_that_is_not_a_socket_is_not_touched(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(elsewhere))
        home = Home.take(tmp_path / "home")
        (home.path / SOCKET_FILE).symlink_to(elsewhere)

        with pytest.raises(HomeError, match="symbolic link"):
            home.listen()
        with pytest.raises(NoDaemon, match="not a socket"):
            connect_socket(home.path, 1.0)
        assert elsewhere.exists()
    (home.path / SOCKET_FILE).unlink()
    (home.path / SOCKET_FILE).write_text("mine")
    with pytest.raises(HomeError, match="not a socket"):
        home.listen()
    home.release()


def test_a_symlink_in_place_of_the_pid_file_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / PID_FILE).symlink_to(precious)

    with pytest.raises(HomeError, match=PID_FILE):
        Home.take(tmp_path / "home")
    assert precious.read_text() == "precious"


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    home = Home.take(tmp_path / ("x" * 100) / ("y" * 100))
    with home.listen():
        connect_socket(home.path, 1.0).close()
        assert mode(home.path / SOCKET_FILE) == 0o600
    home.release()


def test_a_directory_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "thesis.tex").touch()

    with pytest.raises(HomeError, match="chmod 700"):
        Home.take(shared)
    assert mode(shared) == 0o755


def test_a_directory_of_our_own_is_closed_to_others(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(0o755)
    (own / "config.toml").touch()

    Home.take(own).release()
    assert mode(own) == 0o700


def test_a_file_is_refused_as_a_home(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(HomeError, match=r"cannot use .* as a home"):
        Home.take(tmp_path / "file")


def test_a_client_waits_for_a_daemon_that_is_starting(tmp_path: Path) -> None:
    home = Home.take(tmp_path)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        connecting = threads.submit(connect_socket, tmp_path, 1.0, 60.0)
        with pytest.raises(TimeoutError):
            connecting.result(0.2)
        with home.listen():
            connecting.result(60).close()
    home.release()


def test_patience_ends(tmp_path: Path) -> None:
    home = Home.take(tmp_path)
    with pytest.raises(NoDaemon, match="is starting, or stopping"):
        connect_socket(tmp_path, 1.0)
    home.release()


def test_a_client_of_a_daemon_that_cannot_start_is_told(tmp_path: Path) -> None:
    home = Home.take(tmp_path)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        connecting = threads.submit(connect_socket, tmp_path, 1.0, 60.0)
        with pytest.raises(TimeoutError):
            connecting.result(0.2)
        home.release()
        with pytest.raises(NoDaemon, match="no daemon is running"):
            connecting.result(60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    os.chown(other, 12345, 12345)

    with pytest.raises(HomeError, match="belongs to uid 12345"):
        Home.take(other)
