"""What daemons and scripts import, in the same way, for `e2e.forked`."""

import gc

import torch._dynamo  # noqa: F401 # Each optimizer's first step imports it, for two seconds.

from equipoise.dht.hivemind_stub import bare_packages

bare_packages()

import equipoise.peer.cli  # noqa: E402
import equipoise.peer.daemon.daemon  # noqa: E402
import equipoise.peer.daemon.wiring  # noqa: E402, F401
from equipoise.compression import kernels  # noqa: E402

kernels()
gc.collect()
gc.freeze()  # Else each process that is forked would copy all of it as soon as its garbage is collected.
