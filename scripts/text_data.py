"""A text to train on: the Python standard library's own source, which every machine has.

Files come in the order of their paths, every tenth is held out, and the rest is one long text of which each peer owns
an equal piece. A byte is a token: 95 printable characters, the end of a line, and one token for all others, so that
the vocabulary is the same whatever the version of Python. Peers on other versions have other texts; that is no harm.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))
VOCABULARY = len(CHARACTERS) + 1

OTHER = VOCABULARY - 1
"""Tabs, and the bytes of characters outside ASCII."""

NOT_EVERYWHERE = {"dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
"""Folders that some systems leave out, and what was installed beside the library."""

MAX_CHARACTERS = 8_000_000
"""Of 11 million in Python 3.11: other versions have a few more or less, and reading takes a moment in each process."""

HELD_OUT_EVERY = 10

EVALUATION_SEED = 12_345
"""All processes must look at the same windows of the text that was held out."""


class Batch(NamedTuple):
    """Windows of the text, and what follows each of their characters.

    Attributes:
        inputs: i64 [B, T], from 0 to `VOCABULARY` - 1.
        targets: i64 [B, T], the inputs shifted by one.
    """

    inputs: torch.Tensor
    targets: torch.Tensor


class Text(NamedTuple):
    """All characters as tokens.

    Attributes:
        training: u8 [N].
        held_out: u8 [M], of other files.
    """

    training: torch.Tensor
    held_out: torch.Tensor


class Windows:
    """Batches of random windows, for ever; the same for the same seed."""

    def __init__(self, text: torch.Tensor, samples: int, length: int, seed: int) -> None:
        self._text = text
        self._samples = samples
        self._offsets = torch.arange(length + 1)  # (T+1,)
        self._chance = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        most = len(self._text) - len(self._offsets)
        starts = torch.randint(most, (self._samples, 1), generator=self._chance)  # (B, 1)
        windows = self._text[starts + self._offsets].long()  # (B, T+1)
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def read_text(folder: Path | None = None) -> Text:
    """The standard library's source below `folder`, or of the Python that runs this."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    table = np.full(256, OTHER, np.uint8)
    table[list(CHARACTERS.encode())] = np.arange(len(CHARACTERS), dtype=np.uint8)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left = MAX_CHARACTERS
    for number, path in enumerate(_sources(root)):
        content = path.read_bytes().replace(b"\r\n", b"\n")[:left]
        parts[number % HELD_OUT_EVERY == 0].append(content)
        left -= len(content)
        if left == 0:
            break
    training, held_out = (torch.from_numpy(table[np.frombuffer(b"".join(part), np.uint8)]) for part in parts)
    return Text(training, held_out)


def piece(text: torch.Tensor, index: int, peers: int) -> torch.Tensor:
    """Peer `index`'s own part of the text, u8 [N // peers]: each character belongs to at most one of `peers`."""
    size = len(text) // peers
    return text[index * size : (index + 1) * size]


def evaluation_batches(text: Text, batches: int, samples: int, length: int) -> list[Batch]:
    """The windows of the held-out text at which every model is judged."""
    windows = Windows(text.held_out, samples, length, EVALUATION_SEED)
    return [next(windows) for _ in range(batches)]


def joined(batches: Sequence[Batch]) -> Batch:
    """All windows of several batches as one."""
    return Batch(torch.cat([one.inputs for one in batches]), torch.cat([one.targets for one in batches]))


def _sources(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*.py") if not NOT_EVERYWHERE & {*path.relative_to(root).parts})
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
