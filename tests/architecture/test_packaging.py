"""What is installed is what is here, and what is pinned is what is asked for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from architecture.sources import PACKAGES, ROOT, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_folder_is_listed() -> None:
    folders = {".".join(("equipoise", *source.path.parent.parts)) for source in sources(*PACKAGES)}
    front = PROJECT["tool"]["setuptools"]["package-dir"]["equipoise"].replace("/", ".")
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders - {f"equipoise.{front}"} | {"equipoise"}


def test_every_package_folder_has_an_init() -> None:
    folders = {ROOT / source.path.parent for source in sources(*PACKAGES)}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_every_package_is_typed() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


@pytest.mark.slow
def test_a_wheel_offers_the_public_names(tmp_path: Path) -> None:
    source, wheels, installed = (tmp_path / name for name in ("source", "wheels", "installed"))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*build, str(source)], check=True, timeout=120)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    code = """
import equipoise, equipoise.peer
assert equipoise.connect is equipoise.peer.connect and equipoise.Peer is equipoise.peer.Peer
print(equipoise.__version__, equipoise.__file__, equipoise.peer.__file__)
"""
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    front, peer = (str(installed / "equipoise" / place) for place in ("__init__.py", "peer/__init__.py"))
    assert done.stdout.split() == [PROJECT["project"]["version"], front, peer], done.stderr
    unpacked = {path.relative_to(installed) for path in installed.rglob("*.py")}
    expected = {Path("equipoise", one.path) for one in sources(*PACKAGES) if one.path.parts[1] != "front"}
    assert unpacked == expected | {Path("equipoise", one.path.name) for one in sources("peer/front")}


def test_no_folder_here_shadows_the_namespace() -> None:
    assert not (ROOT / "equipoise").exists()


def test_every_direct_dependency_is_pinned() -> None:
    project = PROJECT["project"]
    extras = [need for needs in project["optional-dependencies"].values() for need in needs]
    wanted = {_name(need) for need in [*project["dependencies"], *extras]}
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pinned = {_name(line) for line in lines if "==" in line and not line.startswith("#")}
    assert not wanted - pinned


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
