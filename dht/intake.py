"""The way of records into this daemon: each is verified once, and no sender can keep the verifier busy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from equipoise.dht.limits import Scrutiny
from equipoise.dht.records import Entry, Envelope, Forged, Kept, Readiness, RecordStore, check
from equipoise.dht.sanitize import Malformed, printable

_log = logging.getLogger(__name__)


class Intake:
    """Takes records into `store`.

    Attributes:
        store: The records taken so far.
        scrutiny: Decides which senders' records are verified.
        on_record: Called with the entry of every new record.
    """

    def __init__(self, swarm: bytes = b"") -> None:
        """`swarm` is the key of the private swarm whose records these are."""
        self.store = RecordStore(swarm)
        self.scrutiny = Scrutiny()
        self.on_record: Callable[[Entry], None] = lambda entry: None
        self._verifier = ThreadPoolExecutor(1, "signatures")

    def keep(self, own: Kept) -> None:
        """Take a record of this peer itself, unless a later one of the same identity is there."""
        with _refusing(own):
            record, _ = self.store.examine(own)
            self.on_record(self.store.enter(own, record, time.monotonic()))

    async def take(self, records: Iterable[Kept], sender: str) -> Forged | None:
        """Take the valid ones of a sender's records; return the fault of a sender that is now distrusted.

        A thread verifies the signatures of all peers' records in turn; `Scrutiny` bounds how many wait for it.
        """
        now, store, news = time.monotonic(), self.store, []
        for kept in records:
            known = store.has(kept.subkey)
            if not store.knows(kept, now) and self.scrutiny.admits(sender, kept.subkey, known, now):
                with _refusing(kept):
                    news.append((kept, *store.examine(kept)))
        if not news:
            return None
        loop = asyncio.get_running_loop()
        genuine, forged = await loop.run_in_executor(self._verifier, _verified, news)
        for kept, record, _ in news[:genuine]:
            with _refusing(kept):
                self.on_record(store.enter(kept, record, time.monotonic()))
        if forged is not None:
            self.scrutiny.distrust(sender, time.monotonic())
            _log.info("nothing is taken from %s for a while: %s", sender, forged)
        return forged


@contextlib.contextmanager
def _refusing(kept: Kept) -> Iterator[None]:
    try:
        yield
    except Malformed as error:
        _log.debug("refused a record under %s: %s", printable(kept.subkey, 64), error)


def _verified(news: list[tuple[Kept, Readiness, Envelope]]) -> tuple[int, Forged | None]:
    """Verify signatures up to the first that is forged; return how many are genuine, and the fault."""
    for genuine, (_, record, envelope) in enumerate(news):
        try:
            check(record, envelope)
        except Forged as error:
            return genuine, error
    return len(news), None
