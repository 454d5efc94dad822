"""What README and the guides claim, looked up without a daemon; `test_readme` runs what they show."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import torch

from architecture.sources import PACKAGES, ROOT, sources
from equipoise.compression.spec import parse_codec
from equipoise.peer.config import KEYS

FOLDERS = ("", "peer", "peer/training", "averaging", "compression", "dht", "scripts", "scripts/examples")
PAGES = {folder: (ROOT / folder / "README.md").read_text() for folder in FOLDERS}
README = "\n".join(PAGES.values())

BLOCK = re.compile(
    r"(?P<elsewhere><!-- elsewhere: [^>]*-->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)

KNOWN_KINDS = {"console", "diff", "python", "toml"}

MAX_README_LINES = 150


def test_the_readme_is_short() -> None:
    assert len(PAGES[""].splitlines()) <= MAX_README_LINES, (
        "a guide is the place for more: see CONTRIBUTING.md"
    )


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {found["kind"] for found in BLOCK.finditer(README)} == KNOWN_KINDS


def test_links_lead_to_pages_and_titles() -> None:
    for folder, text in PAGES.items():
        for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
            path, _, title = target.partition("#")
            found = ROOT / folder / (path or "README.md")
            assert found.exists(), f"{folder}/README.md: {target}"
            titles = re.findall(r"^#+ (.*)", found.read_text(), re.M) if title else []
            anchors = {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in titles}
            assert not title or title in anchors, f"{folder}/README.md: {target}"


def test_messages_and_keys_are_those_of_the_program() -> None:
    """What `Troubles` quotes is said somewhere; `...` stands for what differs. All keys of a configuration are told."""
    _, _, troubles = PAGES["peer"].partition("## Troubles")
    said = set(_texts())
    unsaid = [
        message for message in re.findall(r"^- `([^`]+)`", troubles, re.M) if not _is_said(message, said)
    ]
    assert not unsaid
    _, _, settings = PAGES["peer"].partition("## Configuration")
    assert set(KEYS) <= set(re.findall(r"`(\w+)`", settings))


def test_codecs_take_and_lose_what_the_table_says() -> None:
    values = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", PAGES["compression"], re.M)
    assert len(rows) == 6
    for spec, bits, error in rows:
        codec = parse_codec(spec)
        payload, decoded = torch.empty(codec.encoded_size(len(values)), dtype=torch.uint8), values.clone()
        codec.encode(values, payload)
        codec.decode(payload, decoded)
        assert 8 * len(payload) / len(values) == pytest.approx(float(bits), rel=0.01)
        assert float((decoded - values).norm() / values.norm()) == pytest.approx(float(error), rel=0.05)


def _is_said(message: str, said: set[str]) -> bool:
    parts = filter(None, (part.strip(" .") for part in message.split("...")))
    return any(map(re.compile(".*".join(map(re.escape, parts))).search, said))


def _texts() -> Iterator[str]:
    """Every text of the program, with `...` for what is put into it."""
    for node in (node for source in sources(*PACKAGES) for node in source.nodes):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "..." for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
