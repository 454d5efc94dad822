"""What a daemon imports, in the same way, for `e2e.forked`."""

import torch  # noqa: F401

from equipoise.dht.lean import bare_packages

bare_packages()

import equipoise.peer.assembly  # noqa: E402
import equipoise.peer.cli  # noqa: E402
import equipoise.peer.daemon  # noqa: E402, F401
from equipoise.compression import kernels  # noqa: E402

kernels()
