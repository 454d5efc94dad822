"""hivemind without what nobody here uses: its averager, optimisers and mixture of experts take 50 MB and half a second.

They are imported by the `__init__` of hivemind and of hivemind.dht. In a process that is ours alone, those two are
replaced by packages without content, under which the modules that `hivemind_imports` wants are imported by themselves.
"""

from __future__ import annotations

import importlib.util
import sys


def bare_packages() -> None:
    """Keep the rest of hivemind out of this process; to be called before anything imports it, else without effect.

    Not for a process in which others may want hivemind whole: they would find it empty.
    """
    for name in ("hivemind", "hivemind.dht"):
        spec = importlib.util.find_spec(name) if name not in sys.modules else None
        if spec is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
