"""Daemons that differ in kernels, Python or version: equal bits in one round, or one line of refusal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from e2e import swarm as e2e_swarm
from e2e.fleet import Fleet, normal
from e2e.swarm import DaemonProcess, Swarm, eventually
from equipoise.dht.state import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parents[2]

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]

VALUES = 300_000
"""Enough values for a daemon to load its kernels."""

BEFORE = "3c63425"
"""The last commit of protocol 3 of the swarm."""

START = "from equipoise.peer.cli import main; main()"


def without(folder: Path, *modules: str) -> str:
    """The PYTHONPATH with which these modules cannot be imported."""
    folder.mkdir()
    for module in modules:
        (folder / f"{module}.py").write_text(f"raise ImportError('{module} is left out by the test')\n")
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def check_round(daemons: Sequence[DaemonProcess], codec: str = "int8", most: float = 0.010) -> None:
    """All members of a round in a codec end with the same bits, those of the mean."""
    with Fleet(daemons, normal(len(daemons), VALUES), codec=codec) as fleet:
        outcomes = fleet.whole([1.0 + 2.5 * n for n in range(len(daemons))])
        assert all(len(outcome.contributors) == len(daemons) for outcome in outcomes), outcomes
        fleet.check(dict(enumerate(outcomes)), most)


def test_kernels_of_all_kinds_make_equal_bits(swarm: Swarm, tmp_path: Path) -> None:
    bare = f"PYTHONPATH={without(tmp_path / 'bare', 'numba')}"
    daemons: list[DaemonProcess] = []
    for variable in ("EQUIPOISE_NAME=plain", "EQUIPOISE_KERNELS=torch", bare):
        joins = [daemon.address for daemon in daemons[:1]]
        daemons.append(swarm.daemon(join=joins, args=LISTEN, prefix=["env", variable]))
    check_round(daemons)
    check_round(daemons, "nf4", 0.14)
    kernels = [daemon.json("status")["kernels"]["name"] for daemon in daemons]
    assert kernels == ["numba", "numpy", "numpy"]


def pythons() -> Iterator[tuple[str, str]]:
    """The newer Pythons on PATH, or of pyenv, that run: (version, path)."""
    places = [os.environ.get("PATH", ""), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    for minor in (12, 13, 14):
        for place in places:
            found = shutil.which(f"python3.{minor}", path=place)
            if (
                found
                and subprocess.run([found, "-c", "import ensurepip"], capture_output=True).returncode == 0
            ):
                yield f"3.{minor}", found
                break


def pinned(name: str, found: dict[str, str]) -> dict[str, str]:
    """What a daemon imports: the packages that `name` needs, without torch and the packages that only torch needs."""
    for line in metadata.requires(name) or ():
        package = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
        wanted = "extra" not in line or 'extra == "fast"' in line
        if not wanted or package == "torch" or package in found:
            continue
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # For another Python or system.
        pinned(package, found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_pythons_of_other_versions_make_equal_bits(
    swarm: Swarm, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = dict(pythons()).get(version)
    if base is None:
        pytest.skip(f"no python{version} that runs is on PATH or among pyenv's versions")
    subprocess.run([base, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    packages = [f"{name}=={there}" for name, there in pinned("equipoise", {}).items()]
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, *packages], check=True)
    daemons = [swarm.daemon("first", args=LISTEN)]
    daemons += [swarm.daemon("second", join=[daemons[0].address], args=LISTEN)]
    monkeypatch.setattr(e2e_swarm, "CLI", (python, "-c", START))
    prefix = ["env", f"PYTHONPATH={namespace(ROOT, tmp_path)}"]
    daemons += [swarm.daemon("other", join=[daemons[0].address], args=LISTEN, prefix=prefix)]
    monkeypatch.undo()
    check_round(daemons)


def namespace(source: Path, folder: Path) -> Path:
    """A folder from which a Python imports the four packages of `source` as `equipoise`, with its metadata."""
    package = folder / "namespace" / "equipoise"
    package.mkdir(parents=True)
    info = package.with_name("equipoise-0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: equipoise\nVersion: 0\n")
    for part in (
        *(source / name for name in ("averaging", "compression", "dht", "peer")),
        *source.glob("peer/front/*.py"),
    ):
        (package / part.name).symlink_to(part)
    return package.parent


@pytest.mark.slow
def test_a_daemon_of_the_version_before_is_refused_in_a_line(swarm: Swarm, tmp_path: Path) -> None:
    known = subprocess.run(["git", "cat-file", "-e", BEFORE], cwd=ROOT, capture_output=True)
    if known.returncode:
        pytest.skip(f"commit {BEFORE} is not in this clone; git fetch --unshallow brings it")
    source = tmp_path / "before"
    source.mkdir()
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    prefix = ["env", f"PYTHONPATH={namespace(source, tmp_path)}"]
    here = swarm.daemon("here", args=LISTEN)
    older = swarm.daemon("older", join=[here.address], args=LISTEN, prefix=prefix)
    newer = swarm.daemon("newer", join=[older.address], args=LISTEN)
    numbers = f"(protocol version {PROTOCOL_VERSION}, this machine version 3): upgrade this machine's"
    eventually(lambda: f"its equipoise is newer {numbers}" in older.output, "the older daemon's line")
    numbers = f"(protocol version 3, this machine version {PROTOCOL_VERSION}): have it upgraded"
    eventually(lambda: f"its equipoise is older {numbers}" in newer.output, "the newer daemon's line")
    assert "joined: " not in older.output + newer.output + here.output
