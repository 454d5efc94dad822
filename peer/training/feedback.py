"""Error feedback: what a codec has left out of a contribution is added to the next ones.

For local steps alone: beside Adam on gradients it does harm. e is this peer's own, and no other peer gets it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.safetensors_io import ImageError, pack, unpack

Named = Mapping[str, torch.Tensor]

_state = msgspec.json.Decoder(StateId)


class Feedback:
    """e <- beta e + Delta; e <- e - s if s counted, with s what was sent of that sum, decoded.

    SparseLoCo (Sarfi 2025, arXiv:2508.15706, algorithm 1). Until a mean tells whether s counted, e stays as it was:
    after a failed round Delta, which the local copy still holds, is measured again.

    Attributes:
        residual: e, by name, fp32; 0 at first. Its tensors do not change: others take their place.
    """

    def __init__(self, run: JoinedRun, beta: float, tensors: Named) -> None:
        """Take note of what the run sends; `beta` is from 0 to 1, `tensors` are the agreed parameters."""
        self._run, self._beta = run, beta
        self.residual = {name: torch.zeros_like(one) for name, one in tensors.items()}
        self._sum: dict[str, torch.Tensor] | None = None
        self._sent: list[tuple[bytes, int | None]] = []
        run.core.loop.watcher = self

    def add(self, differences: Named) -> dict[str, torch.Tensor]:
        """Return beta e + Delta, to be contributed."""
        self._sum = {name: (self.residual[name] * self._beta).add_(one) for name, one in differences.items()}
        return self._sum

    def again(self) -> dict[str, torch.Tensor]:
        """Return e, to be contributed: it has a contribution that came too late."""
        self._sum = self.residual
        return self._sum

    def withdraw(self) -> None:
        """Note that the last sum was not contributed: it is not finite."""
        self._sum = None

    def applied(self, outcome: Outcome | None) -> None:
        """Note that the mean of a round was applied, which tells whether this peer's contribution counted.

        Without an outcome, this peer has made an outer step alone, with all of the sum.
        """
        if outcome is not None:
            self._settle(self._run.peer in outcome.givers, outcome.round)
        elif self._sum is not None:
            self.residual = {name: torch.zeros_like(one) for name, one in self._sum.items()}
            self._sum, self._sent = None, []

    def replaced(self) -> None:
        """Note that the agreed state has come from another peer: it may have what was sent in it."""
        self._settle(True)

    def image(self, state: StateId) -> torch.Tensor:
        """The residual at a state, u8 [bytes], for this peer's own checkpoint."""
        return pack(self.residual, {"state": msgspec.json.encode(state).decode()})

    def load(self, content: memoryview, state: StateId) -> str:
        """Take on the residual of an image that fits a state; return why not, one line, or nothing."""
        try:
            tensors, found = read_residual(torch.frombuffer(content, dtype=torch.uint8))
        except ImageError as error:
            return f"its file is damaged: {error}"
        if found != state:
            return f"it is of epoch {found.epoch}, and the state of epoch {state.epoch} is another"
        for name, own in self.residual.items():
            one = tensors.get(name)
            if one is None or (one.shape, one.dtype) != (own.shape, own.dtype) or not one.isfinite().all():
                return f"expected finite fp32 values of {name!r} in the shape {list(own.shape)}"
        self.residual = {name: tensors[name].to(own.device, copy=True) for name, own in self.residual.items()}
        return ""

    def sends(self, weight: float, contribution: memoryview) -> None:
        """Keep what was sent of the sum; see `Watcher`."""
        if self._sum is not None and weight > ATTENDANCE_LIMIT:
            self._sent.append((bytes(contribution), None))

    def ended(self, outcome: Outcome) -> None:
        """Note which round that was for; see `Watcher`."""
        if self._sent and self._sent[-1][1] is None:
            payload, _ = self._sent.pop()
            if outcome.group or outcome.in_doubt:  # The others may hold the mean of a round that failed here.
                self._sent.append((payload, outcome.round))

    def _settle(self, counted: bool, round_number: int | None = None) -> None:
        if self._sum is None:
            return
        residual, sent = self._sum, self._sent
        if counted and sent:
            of_round = (payload for payload, known in reversed(sent) if known in (round_number, None))
            payload = bytearray(next(of_round, sent[-1][0]))
            decoded = self._run.core.binding.decoded(memoryview(payload), residual)
            residual = {name: one - decoded[name] for name, one in residual.items()}
        self.residual, self._sum, self._sent = residual, None, []


def read_residual(image: torch.Tensor) -> tuple[dict[str, torch.Tensor], StateId]:
    """Read a residual and its state from an image, u8 [bytes]; raises ImageError if it is damaged."""
    tensors, metadata = unpack(image)
    try:
        return tensors, _state.decode(metadata.get("state", ""))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ImageError(f"expected the id of its state, got {error}") from error
