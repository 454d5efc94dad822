#!/usr/bin/env python
"""Installs the lowest versions that pyproject.toml admits into a fresh environment, and runs some default tests there.

Some gigabytes are downloaded: the lowest torch brings its libraries for GPUs. Exits with the status of pip or pytest.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent

EXTRAS = ("fast",)
"""Extras whose lowest versions are installed, too."""

TOOLS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "safetensors")
"""Needed by the tests alone; any version will do."""

TESTS = (
    "averaging/allreduce",
    "averaging/session",
    "averaging/replication",
    "averaging/aio",
    "compression",
    "dht/direct",
    "dht/test_records.py",
    "dht/test_swarm.py",
    "peer/control",
    "peer/client/test_tensors.py",
    "peer/training/test_image.py",
    "peer/training/test_checkpoint.py",
    "e2e/test_rounds.py",
)
"""Files and folders of tests that use each dependency."""


def floors(requirements: Iterable[str]) -> Iterator[str]:
    """Pin each requirement to the lowest version that it admits.

    Raises:
        ValueError: A requirement has no lowest version.
    """
    for requirement in requirements:
        found = re.match(r"([A-Za-z0-9._-]+)>=([0-9.]+)", requirement)
        if found is None:
            raise ValueError(f"expected a lowest version as in numpy>=1.26, got {requirement!r}")
        yield f"{found[1]}=={found[2]}"


def lowest() -> list[str]:
    """The pins of the package's own requirements, and of those of `EXTRAS`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (one for extra in EXTRAS for one in project["optional-dependencies"][extra])
    return list(floors([*project["dependencies"], *extras]))


@click.command(help=__doc__)
@click.option("--python", default=sys.executable, help="The Python of the environment.")
@click.option("--keep", type=click.Path(path_type=Path), help="Make the environment here, and keep it.")
def main(python: str, keep: Path | None) -> None:
    """Install, then test."""
    with tempfile.TemporaryDirectory() as folder:
        place = keep or Path(folder) / "floors"
        pins = Path(folder) / "floors.txt"
        pins.write_text("".join(f"{pin}\n" for pin in lowest()))
        print(pins.read_text(), flush=True)
        subprocess.run([python, "-m", "venv", place], check=True)
        inside = str(place / "bin/python")
        package = f"{ROOT}[{','.join(EXTRAS)}]"
        installs = subprocess.run([inside, "-m", "pip", "install", "-q", "-c", pins, package, *TOOLS])
        if installs.returncode:
            raise SystemExit(installs.returncode)
        tests = [ROOT / "tests" / name for name in TESTS]
        raise SystemExit(subprocess.run([inside, "-m", "pytest", "-q", *tests], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
