"""A daemon that counts the frames that it writes for rounds, by kind, into the folder `$COUNTED_INTO`.

`python -c "from e2e.counted import main; main()" daemon ...` is `equipoise daemon ...` with such a count.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from unittest import mock

COUNTED = "COUNTED_INTO"


def main() -> None:
    """Run the command line; write the counts at its end."""
    from equipoise.averaging.aio.round_driver import HEADER_PREFIX_BYTES, ROUND_FRAME
    from equipoise.averaging.allreduce import messages
    from equipoise.averaging.session.outbox import Outbox

    counts: Counter[str] = Counter()
    sealed = Outbox._sealed

    def count(self, number, header=b"", body=b""):
        if header[:1] == ROUND_FRAME:
            counts[type(messages.decode(memoryview(header)[HEADER_PREFIX_BYTES:])).__name__] += 1
        return sealed(self, number, header, body)

    mock.patch.object(Outbox, "_sealed", count).start()
    into = Path(os.environ[COUNTED]) / f"{os.getpid()}.json"
    atexit.register(lambda: into.write_text(json.dumps(counts)))
    from equipoise.peer.cli import main as equipoise

    equipoise()
