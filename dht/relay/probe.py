"""What a relay is worth: a megabyte through it, from a peer that exists for this only.

Relays may cut a connection after 128 KiB or 2 minutes, whatever they say: p2pd's own does. Nobody can dial itself, so
a second p2pd with a key of its own plays the peer that wants to reach this one, for as long as the megabyte takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from equipoise.dht.address import Address
from equipoise.dht.identity import IdentityError, load_or_create
from equipoise.dht.p2pd import P2pd, P2pdError, P2pdOptions
from equipoise.dht.p2pd_client import P2pdClient
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.dht.streams import Stream, StreamClosed

TRIAL_PROTOCOL = f"/equipoise/{PROTOCOL_VERSION}/trial"
TRIAL_BYTES = 1024 * 1024
"""Eight times what p2pd's own relay lets pass."""
TRIAL_SECONDS = 12.0
"""p2pd starts in 0.2 s, on a loaded machine in 2 s; a relay slower than 1 Mbit/s is of no use."""
CHUNK_BYTES = 32 * 1024


class RelayError(Exception):
    """A relay gives no place, or is of no use; the message says why."""


@dataclass
class _Transfer:
    """The one under way.

    Attributes:
        peer: PeerID of whoever sends.
        received: Bytes that have arrived.
    """

    peer: str
    received: int = 0


class Trials:
    """Conducts trials, one at a time, and receives what they send."""

    def __init__(self, folder: Path) -> None:
        """`folder` takes the other p2pd's key and socket for the while."""
        self._folder = folder
        self._under_way: _Transfer | None = None
        self._lock = asyncio.Lock()

    async def conduct(self, address: Address) -> str:
        """Send `TRIAL_BYTES` to this peer at `address`, a relayed one; return in words how that went.

        Raises:
            RelayError: Not every byte arrived.
        """
        async with self._lock:
            try:
                with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder:
                    return await self._conduct(address, Path(folder))
            except (OSError, IdentityError, P2pdError) as error:
                raise RelayError(f"it cannot be tried: {error}") from error
            finally:
                self._under_way = None

    async def receive(self, peer: str, relayed: bool, stream: Stream) -> None:
        """Take what the trial under way sends; anybody else's stream is closed."""
        transfer = self._under_way
        if transfer is None or peer != transfer.peer or not relayed:
            return
        chunk = memoryview(bytearray(CHUNK_BYTES))
        async with asyncio.timeout(TRIAL_SECONDS):
            while transfer.received < TRIAL_BYTES:
                transfer.received += await stream.receive_some(chunk)
            await stream.send(b"\1")
            # Closed by whoever tries, who has read the answer then.
            await stream.wait_readable()

    async def _conduct(self, address: Address, folder: Path) -> str:
        identity = load_or_create(folder)
        options = P2pdOptions(identity.path, folder / "c", listen=())
        transfer = self._under_way = _Transfer(identity.peer)
        try:
            async with asyncio.timeout(TRIAL_SECONDS), _attached(options) as link:
                await link.connect(address.peer, address.encode_transport())
                stream = await link.open_stream(address.peer, TRIAL_PROTOCOL)
                began = time.monotonic()
                await _push(stream)
                return f"1 MB passed in {time.monotonic() - began:.2f} s"
        except ConnectionError as error:
            why = f": {error}"
        except TimeoutError:
            why = f" within {TRIAL_SECONDS:.0f} s"
        raise RelayError(f"{transfer.received} of {TRIAL_BYTES} bytes passed{why}")


@contextlib.asynccontextmanager
async def _attached(options: P2pdOptions) -> AsyncIterator[P2pdClient]:
    """A p2pd of its own for the while; raises P2pdError if it does not start, LinkError if it does not answer."""
    p2pd, link = await P2pd.start(options), P2pdClient(options.control)
    try:
        await link.attach({})
        yield link
    finally:
        await link.detach()
        await p2pd.stop()


async def _push(stream: Stream) -> None:
    chunk, answer = bytes(CHUNK_BYTES), bytearray(1)
    try:
        for _ in range(TRIAL_BYTES // CHUNK_BYTES):
            await stream.send(chunk)
        await stream.receive_into(memoryview(answer))
    except StreamClosed as error:
        raise StreamClosed(f"the relay cut the connection ({error})") from None
    finally:
        stream.close()
