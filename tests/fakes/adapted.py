"""A frozen layer in the forms in which people hold a language model, and an adapter."""

from __future__ import annotations

import torch
from torch import nn

from oracles.training import INPUTS, OUTPUTS

HIDDEN = 64


class Adapted(nn.Module):
    """A frozen layer in some form, as of a language model, and an adapter in fp32 that is trained."""

    scale: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.base = nn.Linear(INPUTS, HIDDEN, bias=False)
            self.adapter = nn.Linear(HIDDEN, OUTPUTS)
        self.form, weight = form, self.base.weight.data
        if form == "4 bit":  # As bitsandbytes keeps it: two values a byte, and scales in a buffer.
            self.register_buffer("scale", weight.abs().max() / 7)
            codes = ((weight / self.scale).round() + 8).to(torch.uint8).flatten()
            weight = (codes[::2] * 16 + codes[1::2]).unsqueeze(1)
        elif form == "bf16":
            weight = weight.bfloat16()
        self.base.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.base.weight
        if self.form == "4 bit":
            codes = torch.stack([weight // 16, weight % 16], 1).reshape(HIDDEN, INPUTS)
            weight = (codes.float() - 8) * self.scale
        return self.adapter((inputs @ weight.float().t()).tanh())
