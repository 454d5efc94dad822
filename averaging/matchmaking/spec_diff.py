"""Differences of specs: the machine that finds how the specs of peers in a run of the same name differ.

Peers of one name and different specs see each other's hashes in the directory. A hash shows that something differs, but
not where. So each peer asks some of the others, with four bytes of each of its tensors. The answer names the first
tensor that differs, all options and all terms. Answers are optional: a peer that does not answer is dead, of an older
version, or unwilling, and does not count. Descriptions come from strangers: they are bounded and printable, and serve
only as a line of text.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import msgspec

from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.events import CandidatesSeen, Event, MessageReceived, PeerLost, Send
from equipoise.averaging.matchmaking.topology import rank
from equipoise.averaging.options import RunOptions
from equipoise.averaging.ports import Candidate
from equipoise.averaging.rate_limit import Allowance
from equipoise.averaging.spec import MARK_BYTES, PROTOCOL_VERSION, RunSpec
from equipoise.averaging.timing import SILENCE_SECONDS

MAX_STRANGERS = 16
"""Most peers of other specs that are asked. One answer shows the difference, the others how many live peers have it."""

ANSWER_SECONDS = SILENCE_SECONDS
"""Longest time that a peer waits for an answer."""

ASK_AGAIN_SECONDS, MAX_QUESTIONS = 10.0, 3
"""Time between two questions to a peer that has not answered, and most questions: the peer may have been away."""

MAX_ANSWERS, ANSWERS_SECONDS = 32, 1.0
"""Most answers that a peer gives to all askers together within a time, and that time: an answer may take 10 KB."""

MAX_SHOWN = 60
"""Most characters of a value that a line shows: all the optimizer's options are one value, and only one may differ."""

LEAD = 16
"""Characters shown before the place where two long values begin to differ."""

MAX_DIFFERENCES = 3
"""Most differences that a line names; a user who mixed up two scripts need not read all of them."""


class _Stranger(msgspec.Struct):
    """A peer of another spec; `came_first` if this peer's first look at the directory showed it.

    If its answer is `awaited`, the answer is overdue at `due`. Otherwise the peer may be asked from `due` on.
    """

    spec: str
    reachable: bool
    came_first: bool
    asked: int = 0
    awaited: bool = False
    due: float = float("-inf")
    there_since: float | None = None
    difference: str = ""


class SpecDiff:
    """One peer's view of the peers that have another spec of its run. Times are the seconds of one monotonic clock."""

    def __init__(self, spec: RunSpec, peer: str, now: float) -> None:
        self._spec = spec
        self._peer = peer
        self._began = now
        self._strangers: dict[str, _Stranger] = {}
        self._alike = 0
        self._seen = False
        self._answers = Allowance(ANSWERS_SECONDS, MAX_ANSWERS, MAX_ANSWERS)
        self._out: list[Send] = []

    @property
    def deadline(self) -> float:
        """When an event is due at the latest; infinity if no question is open or due."""
        strangers = self._strangers.values()
        return min((one.due for one in strangers if one.awaited or _may_be_asked(one)), default=float("inf"))

    @property
    def settled(self) -> bool:
        """True if all peers that can be asked have answered, or not answered in time."""
        return not any(one.awaited for one in self._strangers.values())

    @property
    def reason(self) -> str:
        """The difference of the most common other spec, one line; empty if no other spec is known."""
        counts = Counter(one.spec for one in self._strangers.values())
        if not counts:
            return ""
        spec, count = max(counts.items(), key=lambda each: (each[1], each[0]))
        said = next(
            (one.difference for one in self._strangers.values() if one.spec == spec and one.difference), ""
        )
        have = "peer of this name has" if count == 1 else "peers of this name have"
        return f"{count} {have} another spec: {said or 'how it differs has not been said'}"

    def difference(self, peer: str) -> str:
        """The difference of a peer's spec, one line; empty if the spec is the same, or the difference is unknown."""
        return self._strangers[peer].difference if peer in self._strangers else ""

    def objection(self) -> str:
        """Why this peer should not take part with its spec; empty if it may.

        It should not if more live peers share one other spec than share this peer's spec, itself counted. Of two single
        peers, the later should not. So a peer that comes with a mistake never turns away the first peer, and a hostile
        peer never turns away a majority. Dead peers do not answer, and do not count.

        A peer can only claim how long it has been there. The claim of a single peer counts only if this peer's first
        look showed it, before any peer knew of this one: no peer can become the first one later.
        """
        live = [one for one in self._strangers.values() if one.there_since is not None]
        for spec, count in Counter(one.spec for one in live).most_common():
            same = [one for one in live if one.spec == spec]
            earlier = any(one.came_first and (one.there_since or 0.0) < self._began for one in same)
            if count > 1 + self._alike or (count == 1 and not self._alike and earlier):
                who = "a peer that is there has" if count == 1 else f"{count} peers that are there have"
                return f"{who} another spec: {same[0].difference}"
        return ""

    def handle(self, event: Event, now: float) -> Sequence[Send]:
        """Take in an event; return the messages to send."""
        match event:
            case CandidatesSeen(candidates):
                self._see(candidates)
            case MessageReceived(peer, wire.SpecQuestion() as question):
                self._answer(peer, question, now)
            case MessageReceived(peer, wire.SpecAnswer() as answer):
                self._learn(peer, answer, now)
            case PeerLost(peer):
                self._give_up(peer, now)
        self._ask(now)
        out, self._out = self._out, []
        return out

    def _see(self, candidates: Sequence[Candidate]) -> None:
        others = [one for one in candidates if one.peer != self._peer]
        strangers = {one.peer: one for one in others if one.spec != self._spec.hash}
        self._alike = len(others) - len(strangers)
        known, self._strangers = self._strangers, {}
        kept = [peer for peer in known if peer in strangers]
        if room := MAX_STRANGERS - len(kept):
            # Each peer asks in its own order, so that in a large run not all peers ask the same few.
            new = strangers.keys() - known.keys()
            kept += heapq.nsmallest(room, new, key=lambda peer: rank(self._peer, peer))
        for peer in kept:
            before, seen = known.get(peer), strangers[peer]
            if before is None or before.spec != seen.spec:
                before = _Stranger(seen.spec, seen.dialable, came_first=not self._seen)
            before.reachable = before.reachable or seen.dialable
            self._strangers[peer] = before
        self._seen = True

    def _answer(self, peer: str, question: wire.SpecQuestion, now: float) -> None:
        if question.spec == self._spec.hash or not self._answers.admits(peer, now):
            return
        here = min(now - self._began, wire.MAX_PRESENCE)
        description = describe(self._spec, question.marks)
        self._out.append(Send(peer, wire.SpecAnswer(self._spec.name, self._spec.hash, here, description)))
        if peer in self._strangers:
            self._strangers[peer].reachable = True  # By the channel that the stranger has opened.

    def _learn(self, peer: str, answer: wire.SpecAnswer, now: float) -> None:
        stranger = self._strangers.get(peer)
        if stranger is None or not stranger.awaited or answer.spec != stranger.spec:
            return
        stranger.awaited, stranger.asked = False, MAX_QUESTIONS
        stranger.there_since = now - answer.seconds
        stranger.difference = differences(self._spec, answer.description) or "what it tells of it is the same"

    def _give_up(self, peer: str, now: float) -> None:
        stranger = self._strangers.get(peer)
        if stranger is not None and stranger.awaited:
            stranger.awaited, stranger.due = False, now + ASK_AGAIN_SECONDS

    def _ask(self, now: float) -> None:
        for peer, one in self._strangers.items():
            if now >= one.due:
                self._give_up(peer, now)
            if _may_be_asked(one) and now >= one.due:
                one.asked += 1
                one.awaited, one.due = True, now + ANSWER_SECONDS
                self._out.append(
                    Send(peer, wire.SpecQuestion(self._spec.name, self._spec.hash, self._spec.marks))
                )


def _may_be_asked(one: _Stranger) -> bool:
    return one.reachable and not one.awaited and one.asked < MAX_QUESTIONS


def describe(spec: RunSpec, others: bytes) -> wire.Description:
    """Describe a spec to a peer whose tensors have these marks."""
    own, schema = spec.marks, spec.schema
    starts = range(0, max(len(own), len(others)), MARK_BYTES)
    differ = (at for at in starts if own[at : at + MARK_BYTES] != others[at : at + MARK_BYTES])
    place = next((at // MARK_BYTES for at in differ), None)
    note = _note(spec, place)
    return wire.Description(
        PROTOCOL_VERSION, spec.options, spec.terms, schema.size, len(schema.tensors), place, note
    )


def differences(here: RunSpec, there: wire.Description) -> str:
    """Return the differences of two specs, one line; empty if the description shows no difference."""
    if there.version != PROTOCOL_VERSION:
        older = "here" if there.version > PROTOCOL_VERSION else "there"
        return (
            f"protocol version: here {PROTOCOL_VERSION}, there {there.version}; "
            f"the equipoise {older} is older: upgrade it with pip install --upgrade equipoise"
        )
    own, others = dict(here.terms), dict(there.terms)
    found = [_model(here, there)] + [
        _differs(name, own.get(name, "nothing"), others.get(name, "nothing"))
        for name in sorted({**own, **others})
    ]
    for name in sorted(RunOptions.__struct_fields__):
        ours, theirs = (str(getattr(one.options, name)) for one in (here, there))
        found.append(_differs(name.replace("_", " "), ours, theirs))
    found = [each for each in found if each]
    more = len(found) - MAX_DIFFERENCES
    return "; ".join(found[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _model(here: RunSpec, there: wire.Description) -> str:
    ours = _size(here.schema.size, len(here.schema.tensors))
    theirs = _size(there.values, there.tensors)
    if there.place is None:
        return "" if ours == theirs else f"model: here {ours}, there {theirs}"
    tensors = f"{_note(here, there.place) or 'missing'} here, {there.note or 'missing'} there"
    return f"model: tensor {there.place} is {tensors} (here {ours}, there {theirs})"


def _size(values: int, tensors: int) -> str:
    return f"{values} values in {tensors} tensor{'' if tensors == 1 else 's'}"


def _differs(name: str, here: str, there: str) -> str:
    if here == there:
        return ""
    same = next(
        (at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there))
    )
    return f"{name}: here {_around(here, same)}, there {_around(there, same)}"


def _around(text: str, place: int) -> str:
    """The text, if it is long only its part around `place`."""
    if len(text) <= MAX_SHOWN:
        return text
    start = max(min(place - LEAD, len(text) - MAX_SHOWN), 0)
    before, after = "..." if start else "", "..." if start + MAX_SHOWN < len(text) else ""
    return f"{before}{text[start : start + MAX_SHOWN]}{after}"


def _note(spec: RunSpec, place: int | None) -> str:
    if place is None or place >= len(spec.schema.tensors):
        return ""
    tensor = spec.schema.tensors[place]
    kind = " buffer" if tensor.buffer else ""
    shape = f"{tensor.dtype} {list(tensor.shape)}"[: wire.MAX_NOTE_CHARS // 2 - len(kind)] + kind
    name = ascii(tensor.name)
    room = wire.MAX_NOTE_CHARS - len(shape) - 1
    return f"{name if len(name) <= room else name[: room - 3] + '...'} {shape}"
