"""What is installed is what is here, and what is pinned is what is asked for."""

from __future__ import annotations

import re
import tomllib

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
