"""Reduction of encoded contributions on a GPU, or wherever torch computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from equipoise.compression.buffers import Buffer
from equipoise.compression.codec import Codec
from equipoise.compression.errors import CodecError
from equipoise.compression.late_torch import torch


class DeviceReducer:
    """Reduces parts on a device; a part on which the device fails is reduced on the CPU, to the same bytes.

    Attributes:
        executor: A thread for the calls of `reduce`, which wait for the device.
        trouble: The first failure of the device, in one line, for `status`; empty if there was none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.executor: Executor = ThreadPoolExecutor(1, "equipoise-reduce")
        self.trouble = ""

    def reduce(
        self,
        codec: Codec,
        payloads: Sequence[Buffer],
        weights: Sequence[float],
        scratch: NDArray[np.float32],
        mean: Buffer,
    ) -> int:
        """Encode the weighted sum of payloads, in the host's memory as `mean` is; see `Codec.reduce`.

        Args:
            scratch: Memory of f32 [n], for the sum if the device fails.

        Raises:
            CodecError: See `Codec.reduce`; that is the fault of the values, and no device reduces them.
        """
        try:
            room = torch.empty(len(scratch), dtype=torch.float32, device=self.device)
            return codec.reduce(payloads, weights, mean, room)
        except CodecError:
            raise
        # A driver, a compiler, or a device whose memory other programs have taken, may raise anything.
        except Exception as error:
            text = (str(error) or type(error).__name__).splitlines()[0]
            self.trouble = self.trouble or f"{self.device} failed, so the CPU reduced the part: {text}"
        return codec.reduce(payloads, weights, mean, scratch)
