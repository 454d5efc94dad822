"""What a daemon imports, in the same way, for `e2e.forked`."""

import torch  # noqa: F401

from equipoise.dht.hivemind_stub import bare_packages

bare_packages()

from equipoise.compression import kernels  # noqa: E402

kernels()
