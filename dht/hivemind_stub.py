"""hivemind without its averager, optimisers and mixture of experts, which nothing here uses, and the torch they need.

They are imported by the `__init__` of hivemind, of hivemind.dht and of hivemind.utils, and take 2 s and 200 MB. That of
hivemind.p2p imports a client of p2pd. In a process that is ours alone, those four are replaced by packages without
content, under which the modules that `hivemind_imports` wants are imported by themselves.
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
    for name, content in CONTENTS.items():
        spec = importlib.util.find_spec(name) if name not in sys.modules else None
        if spec is not None:
            package = sys.modules[name] = importlib.util.module_from_spec(spec)
            vars(package).update(content)


def _found(wanted: str) -> object:
    """Return the value of a name of hivemind.utils, from one of its modules."""
    for name in UTILITIES:
        module = importlib.import_module(f"hivemind.utils.{name}")
        if not wanted.startswith("_") and hasattr(module, wanted):
            return getattr(module, wanted)
    raise AttributeError(f"hivemind.utils has no {wanted!r} outside of what needs torch")


CONTENTS: dict[str, dict[str, object]] = {
    "hivemind": {},
    "hivemind.dht": {},
    "hivemind.p2p": {"PeerID": str},  # For annotations: the routing table takes any name of a peer.
    "hivemind.utils": {"__getattr__": _found},
}
"""The packages that are replaced, and all that is in them."""
