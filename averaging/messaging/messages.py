"""The frames of messages between scripts: msgpack structs, each the header of a frame.

A sender sends `Open`, and the receiver answers with a `Receipt`, which tells what it has. Then the parts of one message
after another follow, without a question, until a receipt says that the receiver has no room. From then on the sender
asks for room with a bare `Part`, one without a body, until the receiver's script has read all that waited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from equipoise.averaging.matchmaking.messages import Detail, RunName
from equipoise.averaging.ports import Buffer, parser
from equipoise.averaging.session.machine import SESSION_BYTES

MAX_WAITING = 64
"""Most messages that wait at a receiver, and most at a sender for one receiver."""

MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Most bytes of those, and of one message."""

MAX_TOPIC_CHARS = 64

ScriptId = Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
"""Random name of a script's part in a run. A daemon that is started again goes on with it, another script does not."""

Topic = Annotated[str, msgspec.Meta(max_length=MAX_TOPIC_CHARS)]
Number = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Counter = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_WAITING)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_WAITING_BYTES)]


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A message about a run, by its name in scripts."""

    run: RunName


class Open(_Message, frozen=True, tag=True):
    """The sender wants to know what the receiver has of its script."""

    sender: ScriptId


class Part(_Message, frozen=True, tag=True):
    """The body is a part of a message. Without a body, the sender asks for room for the message.

    Attributes:
        sender: The script.
        turn: That of the last receipt; parts of earlier turns are dropped, and are sent again.
        number: Of the message. A sender's numbers grow, and may leave gaps.
        topic: Its topic.
        size: Its bytes.
        offset: Where the part begins.
    """

    sender: ScriptId
    turn: Counter
    number: Number
    topic: Topic
    size: Size
    offset: Annotated[int, msgspec.Meta(ge=0, lt=MAX_WAITING_BYTES)]


class Receipt(_Message, frozen=True, tag=True):
    """The receiver tells all that it has of a sender; a later receipt takes the place of an earlier one.

    Attributes:
        sender, receiver: The scripts.
        turn: Grows where the sender is to send again what this receipt does not have. 0 where it is to open again, as
            after a loss of which only the receiver knows.
        seen: Highest number that was received whole.
        held: Numbers that wait for the receiver's script.
        missing: Numbers up to `seen` that were lost with a daemon before the script had read them.
        waits: Whether a message waits for room; the sender sends none before it is granted.
        granted: Number of the message that has room now, whose parts are to come; 0 for none.
    """

    sender: ScriptId
    receiver: ScriptId
    turn: Counter
    seen: Counter
    held: Numbers = ()
    missing: Numbers = ()
    waits: bool = False
    granted: Counter = 0


class Refusal(_Message, frozen=True, tag=True):
    """The receiver takes no messages of a script now, or never if it is `final`: its own has left the run."""

    sender: ScriptId
    reason: Detail
    final: bool = False


ToReceiver = Open | Part
ToSender = Receipt | Refusal
RunMessage = ToReceiver | ToSender

encode: Callable[[RunMessage], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[Buffer], RunMessage] = parser(RunMessage, "a message between scripts")
"""Parse and check a frame's header that a peer sent; see `ports.parser`."""
