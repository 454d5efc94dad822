"""What a trainer tells the demo, one JSON line each."""

from __future__ import annotations

import msgspec


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round succeeded, and the trainer made an update with its mean.

    Attributes:
        update: Which update this was, from 1.
        group: Number of members of the group.
        contributors: Number of those whose gradients are in the mean.
        loss: Mean loss of the trainer's own samples since the update before.
        bytes_sent: Bytes that its daemon sent.
        seconds: Duration of the round with its matchmaking.
    """

    update: int
    group: int
    contributors: int
    loss: float
    bytes_sent: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round failed, nothing was changed, and the trainer tries again."""

    update: int
    reason: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has made all its updates.

    Attributes:
        digest: SHA-256 in hex of its parameters.
        accuracy: On the test images, 0 to 1.
        alone: The accuracy of the same network after as many updates from its own samples alone.
        values: Number of values in the gradient.
    """

    digest: str
    accuracy: float
    alone: float
    values: int


Report = Stepped | Failed | Finished

_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode_report(report: Report) -> str:
    """One line, without its end."""
    return msgspec.json.encode(report).decode()


def decode_report(line: str) -> Report:
    """The inverse of `encode_report`.

    Raises:
        msgspec.DecodeError: The line is no report.
    """
    return _decoder.decode(line)
