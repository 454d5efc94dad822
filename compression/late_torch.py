"""torch, imported when it is first used: a daemon on a CPU handles bytes, and need not load it (2 s, 150 MB).

Use it as `from equipoise.compression.late_torch import torch`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import torch as torch
else:

    class _Late:
        def __getattr__(self, name: str) -> object:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)  # From now on, a look-up is that of an attribute.
            return value

    torch = _Late()


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether `value` is a tensor; nothing is one in a process that has not imported torch."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))
