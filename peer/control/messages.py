"""The control protocol: requests of a client to its daemon, and the answers.

A frame is a big-endian u32 length and that many bytes of msgpack. The client numbers its requests, `[number, request]`;
the first one is `Hello`. Replies come in any order, each with the number of its request: `[number, refusal, answer]`.
A reply of number 0 is a line for the script's log or, if it refuses, says why the connection ends. Each request names
the type of its answer, as `Request[Status]`; the answer None says that it is done. Tensors travel elsewhere: `JoinRun`,
`OfferState` and `Fetch` carry a descriptor of shared memory beside their frames (SCM_RIGHTS).
"""

from __future__ import annotations

import functools
import math
import operator
import struct
import sys
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec

from equipoise.averaging.draw import Drawn
from equipoise.averaging.messaging import messages as messaging
from equipoise.averaging.messaging.messages import ScriptId, Size
from equipoise.averaging.messaging.receiver import Mailbox, Past
from equipoise.averaging.messaging.sender import Added, Notice
from equipoise.averaging.metrics import Report, Values
from equipoise.averaging.options import Frozen, RunOptions, Terms
from equipoise.averaging.outcome import FetchOutcome, Outcome, RunState
from equipoise.averaging.ports import parser
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.schema import Dtype, Schema
from equipoise.averaging.state import StateId
from equipoise.limits import Mark
from equipoise.peer.errors import ControlError
from equipoise.peer.status import PeerRow, Status

CONTROL_VERSION = 13

MAX_FRAME_BYTES = 2 * 1024 * 1024
"""The largest messages are a schema (10,000 tensors with names of 60 characters take half of it) and 64 outcomes."""

MAX_TEXT = 4096
"""Longest reason or error that is sent; longer ones are cut."""

MAX_TIMEOUT = 86_400.0
"""A day; a longer wait is a mistake in the unit."""

LENGTH = struct.Struct(">I")

Answer = TypeVar("Answer")
Topic = Literal["training", "checkpoints", "places"]

Weight = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""A finite number; what is decoded needs no other check."""

Timeout = Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
"""Seconds; what is decoded needs no other check."""


class Request(msgspec.Struct, Generic[Answer], frozen=True, tag=True):
    """A request of a client; `Answer` is the type of the daemon's answer, if it does not refuse."""


class RunRequest(Request[Answer], Generic[Answer], frozen=True):
    """A request about the run of this name."""

    run: str


class Welcome(msgspec.Struct, frozen=True):
    """The daemon that answers; `home` is empty where the home goes with the daemon.

    `named` are the PeerIDs by which its user had it join the swarm.
    """

    peer_id: str
    name: str
    pid: int
    home: str = ""
    named: frozenset[str] = frozenset()


class Hello(Request[Welcome], frozen=True):
    """The first request of a connection."""

    version: int
    client: str


class Ping(Request[None], frozen=True):
    """Answered at once: the daemon lives, however long it works on another request."""


class JoinRun(RunRequest[None], frozen=True):
    """Take part in a run: `tensors` is the schema of `average`, `gradients` that of `step`.

    The shared memory, of two encoded vectors of `size` bytes, comes beside this frame.
    """

    options: RunOptions
    tensors: Schema
    gradients: Schema
    size: int
    mailbox: Mailbox = Mailbox()


class AgreeRun(RunRequest[str], frozen=True):
    """Have `step` meet only peers with these terms, and with `buffers` behind their gradients.

    A peer that `observes` is never drawn. Other peers may have other terms, or other `dtypes` of the parameters, in
    order, if any are told, or other `frozen` tensors: refused if those have a say, else the answer is the difference,
    one line.
    """

    terms: Terms
    buffers: Schema
    observes: bool = False
    dtypes: tuple[Dtype, ...] = ()
    frozen: Frozen = ()


class StartRound(RunRequest[Outcome], frozen=True):
    """Average the content of the shared memory; `Run.step` describes the other fields.

    Attributes:
        purpose: Whether it is encoded tensors or gradients.
        weight: Of the contribution; 0 observes.
        clamped: Number of values that were clamped when the contribution was encoded.
        norm: 2-norm of the encoded values; infinite where nothing was encoded.
    """

    purpose: Literal["average", "step"]
    weight: Weight
    timeout: Timeout
    state: StateId | None = None
    metrics: Values = {}
    evaluation: Report | None = None
    clamped: Annotated[int, msgspec.Meta(ge=0)] = 0
    norm: Annotated[float, msgspec.Meta(ge=0.0)] = math.inf


class ReportAccumulated(RunRequest[None], frozen=True):
    """This client has accumulated `weight` towards its next step."""

    weight: Weight


class TellStatus(RunRequest[None], frozen=True):
    """A line of the training script for `status`, cut at `MAX_TEXT`; it replaces the last one on that topic."""

    topic: Topic
    line: str


class AskState(RunRequest[RunState], frozen=True):
    """Ask for the standing of the next round of the run."""


class AskMembers(RunRequest[tuple[str, ...]], frozen=True):
    """Ask for the PeerIDs of the live peers of the run that train, sorted.

    With `data`, the mark of a data set that this peer shares from now on, only those that share it too.
    """

    data: Mark = ""


class Progress(msgspec.Struct, frozen=True):
    """Answers `AskProgress`: weight accumulated towards the next step.

    Attributes:
        local: By this peer.
        swarm: By this peer and, a moment ago, by all others of the run that answer, as far as their word counts.
        wanted: Epoch of which some peer wants a snapshot; None while none does. A peer that holds that state offers it.
            A later state serves too, but donors may then differ and the newcomer must ask again.
        waits: Why this peer contributes to no round for now, one line; empty if it may.
        drawn: The peers that train from the state that this peer holds, if it was told, and those that live.
        awaited: Whether a peer by which the user had this one join is in the run, and has trained.
    """

    local: float
    swarm: float
    wanted: int | None = None
    waits: str = ""
    drawn: Drawn = Drawn((), ())
    awaited: bool = False


class AskProgress(RunRequest[Progress], frozen=True):
    """Ask for the weight accumulated by this peer and the others; all are to reach `target`, if there is one.

    This peer holds the state `held`, if that is given.
    """

    target: float | None = None
    held: StateId | None = None


class OfferState(RunRequest[None], frozen=True):
    """Serve a snapshot of this state, which is the `size` bytes of shared memory that come beside this frame."""

    state: StateId
    size: int


class Fetch(RunRequest[FetchOutcome], frozen=True):
    """Download a snapshot, or an encoded mean, into the `size` bytes of shared memory beside this frame."""

    size: int
    timeout: Timeout
    wish: Wish


class SendMessage(RunRequest[None], frozen=True):
    """Send a message to a peer, `size` bytes at `at` in `Region.sent`; `AskNotices` tells what becomes of it."""

    to: str
    topic: messaging.Topic
    at: int
    size: Size
    added: Added


class AskNotices(RunRequest[tuple[Notice, ...]], frozen=True):
    """Wait for news of the messages that were sent; none come once the run is left."""


class Arrival(msgspec.Struct, frozen=True):
    """A message for the script, from a script of another peer: `size` bytes at `at` in `Region.received`.

    Attributes:
        peer: The sender.
        script: Its script.
        past: What this script has read of it; another daemon must know.
    """

    peer: str
    script: ScriptId
    past: Past
    at: int
    size: Size


class ReceiveMessage(RunRequest[Arrival | None], frozen=True):
    """Take the next message of this topic, or None if none comes within the timeout; give pieces at `back` back."""

    topic: messaging.Topic
    timeout: Timeout
    back: tuple[int, ...] = ()


class StopRound(RunRequest[None], frozen=True):
    """End the search for a group: `StartRound` is answered then, with the reason. A round that has begun goes on."""

    why: str


class StopFetch(RunRequest[None], frozen=True):
    """End the download that is going on, if any; `Fetch` is answered then."""


class LeaveRun(RunRequest[None], frozen=True):
    """Leave the run; an open round is finished or failed first."""


class AskStatus(Request[Status], frozen=True):
    """Ask for the daemon's status."""


class AskPeers(Request[tuple[PeerRow, ...]], frozen=True):
    """Ask for the known peers of the daemon's runs."""


class AskRounds(Request[tuple[Outcome, ...]], frozen=True):
    """Ask for the last outcomes of each run."""

    limit: int


class Revoke(Request[tuple[str, ...]], frozen=True):
    """Revoke a PeerID or an invitation of the daemon's private swarm; answered with what the signed list names."""

    target: str


class Ban(Request[None], frozen=True):
    """Have the daemon refuse a peer for a reason, which may be empty; with None as reason it does so no longer."""

    peer: str
    reason: str | None


class StopDaemon(Request[None], frozen=True):
    """Stop gracefully; answered before the daemon ends."""


_encoder = msgspec.msgpack.Encoder()
_requests = {*Request.__subclasses__(), *RunRequest.__subclasses__()} - {RunRequest}
_answers = {
    kind: parser(get_args(kind.__orig_bases__[0])[0], f"the answer to {kind.__name__}", ControlError)  # type: ignore[attr-defined]
    for kind in _requests
}

decode_number: Callable[[bytes], tuple[int, msgspec.Raw]] = parser(
    tuple[int, msgspec.Raw], "a numbered message", ControlError
)
"""Take the number of a frame from a client, and the message, which `decode_request` takes; raises ControlError."""

decode_request: Callable[[msgspec.Raw], Request[Any]] = parser(
    functools.reduce(operator.or_, _requests), "a request that the daemon understands", ControlError
)
"""Decode the message of a client; raises ControlError."""

decode_reply: Callable[[bytes], tuple[int, str | None, msgspec.Raw]] = parser(
    tuple[int, str | None, msgspec.Raw], "a numbered message", ControlError
)
"""Take the number of a frame from a daemon, why it refuses, if so, and the answer, which `decode_answer` takes; raises
ControlError."""

decode_line: Callable[[msgspec.Raw], str] = parser(str, "a line", ControlError)
"""Decode a line that the daemon has for the script's log; raises ControlError."""


def encode(number: int, request: Request[Any]) -> bytes:
    """One frame of a client, length included.

    Raises:
        ControlError: It exceeds `MAX_FRAME_BYTES`.
    """
    return _framed((number, request), type(request).__name__)


def encode_reply(number: int, answer: object = None, failure: str | None = None) -> bytes:
    """Encode one frame of the daemon, length included: an answer, or the reason of its failure, cut if it is long.

    Raises:
        ControlError: It exceeds `MAX_FRAME_BYTES`.
    """
    return _framed((number, failure and failure[:MAX_TEXT], answer), type(answer).__name__)


def decode_answer(request: Request[Answer], content: msgspec.Raw) -> Answer:
    """Decode the daemon's answer to a request.

    Raises:
        ControlError: The answer has another type than the request names.
    """
    answer: Answer = _answers[type(request)](content)
    return answer


def _framed(content: object, what: str) -> bytes:
    encoded = _encoder.encode(content)
    if len(encoded) > MAX_FRAME_BYTES:
        told = f"a {what} of {len(encoded)} bytes exceeds the control socket's {MAX_FRAME_BYTES}"
        raise ControlError(told, "average fewer tensors: fuse small ones, or shorten their names")
    return LENGTH.pack(len(encoded)) + encoded
