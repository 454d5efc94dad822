"""The control protocol: what a client asks of its daemon, and what comes back.

A frame is a big-endian u32 length and that many bytes of msgpack: `[number, message]`. The client numbers its requests;
each reply carries the number of its request, in any order; number 0 is a `Failed` for the whole connection. The first
request is `Hello`. Tensors do not travel here: `JoinRun`, `OfferState`, `FetchState` and `FetchMean` carry a descriptor
of shared memory beside their frames (SCM_RIGHTS).
"""

from __future__ import annotations

import struct
import sys
from typing import Annotated, TypeVar

import msgspec

from equipoise.averaging.options import RunOptions, Terms
from equipoise.averaging.outcome import Outcome, RunState
from equipoise.averaging.schema import Schema
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.outcome import FetchOutcome, MeanOutcome
from equipoise.peer.errors import ControlError
from equipoise.peer.status import PeerRow, Status

CONTROL_VERSION = 5

MAX_FRAME_BYTES = 2 * 1024 * 1024
"""The largest messages are a schema (10,000 tensors with names of 60 characters take half of it) and 64 outcomes."""

TOPICS = ("training", "checkpoints")
"""What a training script says something about."""

MAX_TEXT = 4096
"""Longest reason or error that is sent; longer ones are cut."""

MAX_TIMEOUT = 86_400.0
"""A day; a longer wait is a mistake in the unit."""

LENGTH = struct.Struct(">I")

Weight = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""A finite number; what is decoded needs no other check."""

Timeout = Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
"""Seconds; what is decoded needs no other check."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first request of a connection."""

    version: int
    client: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Who answers.

    Attributes:
        version: `CONTROL_VERSION`.
        peer_id: Its PeerID.
        name: What people call it.
        pid: Its process.
        software: What it runs.
        home: Its home; empty where that is gone when the daemon ends.
    """

    version: int
    peer_id: str
    name: str
    pid: int
    software: str
    home: str = ""


class JoinRun(msgspec.Struct, frozen=True, tag=True):
    """Take part in a run; the shared memory comes beside this frame.

    Attributes:
        run: Name of the run.
        options: How it averages.
        tensors: What `average` exchanges.
        gradients: What `step` exchanges.
        values: Length of each of the two vectors in the shared memory.
    """

    run: str
    options: RunOptions
    tensors: Schema
    gradients: Schema
    values: int


class AgreeRun(msgspec.Struct, frozen=True, tag=True):
    """What the peers that `step` must have alike, before they do; refused if those who are there have something else.

    Attributes:
        run: Name of the run.
        terms: Pairs of what is agreed on and what it is.
        buffers: What travels behind the gradients.
    """

    run: str
    terms: Terms
    buffers: Schema


class StartRound(msgspec.Struct, frozen=True, tag=True):
    """Average what the shared memory holds; `purpose` is `average` or `step`, `state` what this peer holds."""

    run: str
    purpose: str
    weight: Weight
    timeout: Timeout
    state: StateId | None = None


class RoundEnded(msgspec.Struct, frozen=True, tag=True):
    """What the round came to; if ok, the mean is in the shared memory."""

    outcome: Outcome


class ReportAccumulated(msgspec.Struct, frozen=True, tag=True):
    """This client has accumulated `weight` towards its next step."""

    run: str
    weight: Weight


class TellStatus(msgspec.Struct, frozen=True, tag=True):
    """A line of the training script for `status`; it replaces the last one on that topic.

    Attributes:
        run: Name of the run.
        topic: One of `TOPICS`.
        line: What is longer than `MAX_TEXT` is cut.
    """

    run: str
    topic: str
    line: str


class AskState(msgspec.Struct, frozen=True, tag=True):
    """Where does the next round of the run stand?"""

    run: str


class StateIs(msgspec.Struct, frozen=True, tag=True):
    """Answers `AskState`."""

    state: RunState


class AskProgress(msgspec.Struct, frozen=True, tag=True):
    """How much has been accumulated?

    Attributes:
        target: Weight that all peers accumulate for a round; None without a target.
    """

    run: str
    target: float | None = None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Answers `AskProgress`: weight accumulated towards the next step.

    Attributes:
        local: By this peer.
        swarm: By all peers of the run that answer, this one included, as far as their word counts; a little behind for
            the others.
        wanted: Epoch of which some peer wants a snapshot; None while none does. A peer that holds
            that state offers it. A later state serves too, but donors may then differ and the newcomer must ask again.
    """

    local: float
    swarm: float
    wanted: int | None = None


class OfferState(msgspec.Struct, frozen=True, tag=True):
    """Serve a snapshot of this state, which is the `size` bytes of shared memory that come beside this frame."""

    run: str
    state: StateId
    size: int


class FetchState(msgspec.Struct, frozen=True, tag=True):
    """Download a snapshot of epoch `at_least` or later into the `limit` bytes of shared memory beside this frame.

    It is taken `among` these peers alone while any of them is there.
    """

    run: str
    at_least: int
    limit: int
    timeout: Timeout
    among: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)] = ()


class StopRound(msgspec.Struct, frozen=True, tag=True):
    """End the search for a group: `StartRound` is answered then. A round that has begun goes on.

    Attributes:
        run: Name of the run.
        why: Why, one line, for the outcome.
    """

    run: str
    why: str


class StopFetch(msgspec.Struct, frozen=True, tag=True):
    """End the download that is going on, if any; `FetchState` or `FetchMean` is answered then."""

    run: str


class FetchMean(msgspec.Struct, frozen=True, tag=True):
    """Get the mean that the group applied to the state `after`.

    Attributes:
        run: Name of the run.
        after: The state.
        size: Bytes of the shared memory beside this frame, into which it goes, f32.
        timeout: Seconds.
        proved: Whether the client will know by its digest whether it is the group's.
        patient: Where nobody has it: whether to wait for those who are not as far.
    """

    run: str
    after: StateId
    size: int
    timeout: Timeout
    proved: bool = False
    patient: bool = False


class MeanFetched(msgspec.Struct, frozen=True, tag=True):
    """What that came to; if the round is ok, the mean is in the shared memory."""

    outcome: MeanOutcome


class StateFetched(msgspec.Struct, frozen=True, tag=True):
    """What the download came to; if ok, the image is in the shared memory."""

    outcome: FetchOutcome


class LeaveRun(msgspec.Struct, frozen=True, tag=True):
    """Leave the run; an open round is finished or failed first."""

    run: str


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """What is going on, and why?"""


class StatusIs(msgspec.Struct, frozen=True, tag=True):
    """Answers `AskStatus`."""

    status: Status


class AskPeers(msgspec.Struct, frozen=True, tag=True):
    """Who takes part in the runs of this daemon?"""


class PeersAre(msgspec.Struct, frozen=True, tag=True):
    """Answers `AskPeers`."""

    peers: tuple[PeerRow, ...]


class AskRounds(msgspec.Struct, frozen=True, tag=True):
    """What have the last rounds come to?"""

    limit: int


class RoundsAre(msgspec.Struct, frozen=True, tag=True):
    """Answers `AskRounds`, oldest first."""

    rounds: tuple[Outcome, ...]


class StopDaemon(msgspec.Struct, frozen=True, tag=True):
    """Stop gracefully; answered before the daemon ends."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is done, and there is nothing to tell."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request was refused; `reason` says what was expected and what came."""

    reason: str


RunRequest = (
    AgreeRun
    | StartRound
    | StopRound
    | StopFetch
    | ReportAccumulated
    | TellStatus
    | AskState
    | AskProgress
    | LeaveRun
)
"""What is asked of one run, and brings no memory with it."""

RequestBody = (
    Hello
    | JoinRun
    | RunRequest
    | OfferState
    | FetchState
    | FetchMean
    | AskStatus
    | AskPeers
    | AskRounds
    | StopDaemon
)
ReplyBody = (
    Welcome
    | RoundEnded
    | StateIs
    | Progress
    | StateFetched
    | MeanFetched
    | StatusIs
    | PeersAre
    | RoundsAre
    | Done
    | Failed
)

Body = TypeVar("Body")

_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes of the wrong form, for text that is not UTF-8, and for values nested too deep."""

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_request = msgspec.msgpack.Decoder(RequestBody)
_reply = msgspec.msgpack.Decoder(ReplyBody)


class NotUnderstood(ControlError):
    """A frame is well-formed but its message is not one of this version; carries the number to answer."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def encode(number: int, body: RequestBody | ReplyBody) -> bytes:
    """One frame, length included.

    Raises:
        ControlError: It exceeds `MAX_FRAME_BYTES`.
    """
    content = _encoder.encode((number, body))
    if len(content) > MAX_FRAME_BYTES:
        raise ControlError(
            f"a {type(body).__name__} of {len(content)} bytes exceeds the control socket's {MAX_FRAME_BYTES}",
            "average fewer tensors: fuse small ones, or shorten their names",
        )
    return LENGTH.pack(len(content)) + content


def decode_request(frame: bytes) -> tuple[int, RequestBody]:
    """The number and message of a frame from a client.

    Raises:
        NotUnderstood: The message is unknown or malformed.
        ControlError: The frame is not even numbered.
    """
    return _decode(frame, _request)


def decode_reply(frame: bytes) -> tuple[int, ReplyBody]:
    """The number and message of a frame from a daemon.

    Raises:
        NotUnderstood: The message is unknown or malformed.
        ControlError: The frame is not even numbered.
    """
    return _decode(frame, _reply)


def _decode(frame: bytes, message: msgspec.msgpack.Decoder[Body]) -> tuple[int, Body]:
    try:
        number, raw = _envelope.decode(frame)
    except _MALFORMED as error:
        raise ControlError(
            f"expected a numbered message, got {len(frame)} bytes that are none: {error}"
        ) from error
    try:
        return number, message.decode(raw)
    except _MALFORMED as error:
        raise NotUnderstood(number, str(error)) from error
