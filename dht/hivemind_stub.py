"""hivemind without its averager, optimisers and mixture of experts, which nothing here uses, and the torch they need.

They are imported by the `__init__` of hivemind, of hivemind.dht and of hivemind.utils, and take 2 s and 200 MB. In a
process that is ours alone, those three are replaced by packages without content, under which the modules that
`hivemind_imports` wants are imported by themselves.
"""

from __future__ import annotations

import importlib.util
import sys

UTILITIES = ("logging", "serializer", "timed_storage")
"""Modules of hivemind.utils whose names its other packages import from hivemind.utils itself; none needs torch."""


def bare_packages() -> None:
    """Keep the rest of hivemind out of this process; to be called before anything imports it, else without effect.

    Not for a process in which others may want hivemind whole: they would find it empty.
    """
    for name in ("hivemind", "hivemind.dht", "hivemind.utils"):
        spec = importlib.util.find_spec(name) if name not in sys.modules else None
        if spec is not None:
            package = sys.modules[name] = importlib.util.module_from_spec(spec)
            if name == "hivemind.utils":
                vars(package)["__getattr__"] = _found


def _found(wanted: str) -> object:
    """Return the value of a name of hivemind.utils, from one of its modules."""
    for name in UTILITIES:
        module = importlib.import_module(f"hivemind.utils.{name}")
        if not wanted.startswith("_") and hasattr(module, wanted):
            return getattr(module, wanted)
    raise AttributeError(f"hivemind.utils has no {wanted!r} outside of what needs torch")
