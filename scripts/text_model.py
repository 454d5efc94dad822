"""A character-level transformer, small enough for a core of a CPU: what nanoGPT is, with what is common since.

Rotary positions, RMS norms without parameters, squared ReLU, no biases, and an output layer of its own.
"""

from __future__ import annotations

import torch
from text_data import VOCABULARY, Batch
from torch import nn
from torch.nn.functional import cross_entropy, relu, rms_norm, scaled_dot_product_attention

ROTARY_BASE = 10_000.0

MODEL_SEED = 1
"""All peers start from the same parameters."""


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Of x, f32 (B, T, C), to (B, T, C)."""
        B, T, C = x.shape  # noqa: N806
        heads = self.queries_keys_values(x).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        q, k = rotated(norm(q), rotation), rotated(norm(k), rotation)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        projected: torch.Tensor = self.out(y.transpose(1, 2).reshape(B, T, C))
        return projected


class Block(nn.Module):
    """Attention, then two layers for each position, both added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Of x, f32 (B, T, C), to (B, T, C)."""
        x = x + self.attention(norm(x), rotation)
        added: torch.Tensor = self.down(relu(self.up(norm(x))).square())
        return x + added


class TextModel(nn.Module):
    """Predicts the next character at every position; calling it with a batch gives the mean loss in nats."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        cos, sin = rotations(length, width // heads)
        # Not persistent: they are no state, every peer computes them.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def forward(self, batch: Batch) -> torch.Tensor:
        """The mean cross-entropy of `batch`, f32 []."""
        x = norm(self.embedding(batch.inputs))  # (B, T, C)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits = self.head(norm(x))  # (B, T, V)
        return cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    def _initialise(self) -> None:
        chance = torch.Generator().manual_seed(MODEL_SEED)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=chance)
        for block in self.blocks:  # Each block is the identity at first, and every character as likely.
            assert isinstance(block, Block)
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.down.weight)
        nn.init.zeros_(self.head.weight)


def norm(x: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last dimension, without parameters."""
    return rms_norm(x, (x.size(-1),))


def rotations(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angles by which heads of `size` are turned at each position, f32 (T, D/2) each."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, size, 2) / size)  # (D/2,)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions (Su 2021): each pair of coordinates of x, (B, H, T, D), turned by its position's angle."""
    cos, sin = rotation  # (T, D/2) each
    first, second = x.chunk(2, dim=-1)  # (B, H, T, D/2) each
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


@torch.no_grad()
def held_out_loss(model: TextModel, batches: list[Batch]) -> float:
    """Mean loss over `batches` of equal size, in nats per character."""
    return sum(float(model(batch)) for batch in batches) / len(batches)
