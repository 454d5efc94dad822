"""Differences of specs: the machine that finds how the specs of peers in a run of the same name differ.

Peers of one name and different specs see each other's hashes in the directory. A hash shows that something differs, but
not where. So each peer asks some of the others, with four bytes of each of its tensors. The answer is a table of the
other spec: the first tensor that differs, all options and all terms. A peer that does not answer is dead, of an older
version, or unwilling, and does not count. Answers come from strangers: they are bounded and printable, and serve only
as a line of text.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set

import msgspec

from equipoise.averaging.counts import count
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.events import CandidatesSeen, Event, MessageReceived, PeerLost, Send
from equipoise.averaging.matchmaking.topology import rank
from equipoise.averaging.options import MARK_BYTES, MAX_TERM_VALUE_CHARS
from equipoise.averaging.spec import PLACES, PROTOCOL_VERSION, RunSpec
from equipoise.averaging.timing import SILENCE_SECONDS
from equipoise.limits import Allowance, Candidate

MAX_STRANGERS = 16
"""Most peers of other specs that are asked, those that are heeded first. One answer shows the difference."""

ANSWER_SECONDS = SILENCE_SECONDS
"""Longest time that a peer waits for an answer."""

ASK_AGAIN_SECONDS, MAX_QUESTIONS = 10.0, 3
"""Time between two questions to a peer that has not answered, and most questions: the peer may have been away."""

MAX_ANSWERS, ANSWERS_SECONDS = 32, 1.0
"""Most answers that a peer gives within a time, one to each asker, and that time: an answer may take 10 KB."""

MAX_SHOWN = 60
"""Most characters of a value that a line shows: all the optimizer's options are one value, and only one may differ."""

LEAD = 16
"""Characters shown before the place where two long values begin to differ."""

MAX_DIFFERENCES = 3
"""Most differences that a line names; a user who mixed up two scripts need not read all of them."""


class _Stranger(msgspec.Struct):
    """A peer of another spec.

    Its answer is waited for until `answer_by`. It is asked again some time after that.
    """

    spec: str
    reachable: bool
    asked: int = 0
    answer_by: float = float("-inf")
    there_since: float | None = None
    difference: str = ""


class SpecDiff:
    """One peer's view of the peers that have another spec of its run. Times are the seconds of one monotonic clock.

    Attributes:
        deadline: Never: all that is due by the clock is done at the next look at the directory.
        named: PeerIDs of the peers that the user named, each of which may turn this peer away.
        trained: PeerIDs of the other peers in the last mean that this peer had, more than half of which may.
    """

    deadline = float("inf")

    def __init__(self, spec: RunSpec, peer: str, now: float) -> None:
        self._spec = spec
        self._peer = peer
        self._began = now
        self.named: Set[str] = frozenset()
        self.trained: Set[str] = frozenset()
        self._strangers: dict[str, _Stranger] = {}
        self._first: dict[str, str] | None = None
        self._answers = Allowance(ANSWERS_SECONDS, MAX_ANSWERS)

    def settled(self, now: float) -> bool:
        """True if the directory was read, and all peers that can be asked have answered, or not answered in time."""
        return self._first is not None and all(
            now >= stranger.answer_by for stranger in self._strangers.values()
        )

    @property
    def reason(self) -> str:
        """The difference of the most common other spec, one line; empty if no other spec is known."""
        strangers = self._strangers.values()
        if not strangers:
            return ""
        [(spec, number)] = Counter(stranger.spec for stranger in strangers).most_common(1)
        said = next(
            (stranger.difference for stranger in strangers if stranger.spec == spec and stranger.difference),
            "",
        )
        have = "peer of this name has" if number == 1 else "peers of this name have"
        return f"{number} {have} another spec: {said or 'how it differs has not been said'}"

    def difference(self, peer: str) -> str:
        """The difference of a peer's spec, one line; empty if the spec is the same, or the difference is unknown."""
        return self._strangers[peer].difference if peer in self._strangers else ""

    def objection(self) -> str:
        """Why this peer should not take part with its spec; empty if it may.

        Identities are free, so no number of strangers turns this peer away: it waits beside them, and `reason` names
        the difference. A peer that the user named may, and more than half of the peers of this peer's last mean. Dead
        peers do not answer, and have no say.

        A peer can only claim how long it has been there. The claim counts only if this peer's first look showed it with
        that spec, before any peer knew of this one: so a peer that comes later with a mistake turns nobody away.
        """
        earlier = {
            peer: stranger.difference
            for peer, stranger in self._strangers.items()
            if stranger.there_since is not None
            and stranger.there_since < self._began
            and (self._first or {}).get(peer) == stranger.spec
        }
        for peer in self.named & earlier.keys():
            return f"..{peer[-8:]}, which this daemon was told to join by, has another spec: {earlier[peer]}"
        differ = sorted(self.trained & earlier.keys())
        if 2 * len(differ) > len(self.trained):
            of = f"{len(differ)} of {count(len(self.trained), 'peer')} that this peer has trained with"
            return f"{of} have another spec: {earlier[differ[0]]}"
        return ""

    def handle(self, event: Event, now: float) -> Sequence[Send]:
        """Take in an event; return the messages to send."""
        out: list[Send] = []
        match event:
            case CandidatesSeen(candidates):
                self._see(candidates)
            case MessageReceived(peer, wire.SpecQuestion() as question):
                out += self._answer(peer, question, now)
            case MessageReceived(peer, wire.SpecAnswer() as answer) if peer in self._strangers:
                self._learn(self._strangers[peer], answer, now)
            case PeerLost(peer) if peer in self._strangers:
                stranger = self._strangers[peer]
                stranger.answer_by = min(stranger.answer_by, now)
        return out + self._ask(now)

    def _see(self, candidates: Sequence[Candidate]) -> None:
        others = [record for record in candidates if record.peer != self._peer]
        strangers = {record.peer: record for record in others if record.spec != self._spec.hash}
        if self._first is None:
            self._first = {peer: record.spec for peer, record in strangers.items()}
        known, self._strangers = self._strangers, {}
        # Each peer asks in its own order, so that in a large run not all peers ask the same few.
        heeded = self.named | self.trained
        order = sorted(
            strangers, key=lambda peer: (peer not in heeded, peer not in known, rank(self._peer, peer))
        )
        for peer in order[:MAX_STRANGERS]:
            before, seen = known.get(peer), strangers[peer]
            if before is None or before.spec != seen.spec:
                before = _Stranger(seen.spec, seen.dialable)
            before.reachable = before.reachable or seen.dialable
            self._strangers[peer] = before

    def _answer(self, peer: str, question: wire.SpecQuestion, now: float) -> list[Send]:
        if question.spec == self._spec.hash or not self._answers.admits(peer, now):
            return []
        if peer in self._strangers:
            self._strangers[peer].reachable = True  # By the channel that the stranger has opened.
        here = min(now - self._began, wire.MAX_PRESENCE)
        return [Send(peer, answer_of(self._spec, question.marks, here))]

    def _learn(self, stranger: _Stranger, answer: wire.SpecAnswer, now: float) -> None:
        if not stranger.asked or stranger.there_since is not None or answer.spec != stranger.spec:
            return
        stranger.answer_by, stranger.there_since = now, now - answer.seconds
        stranger.difference = differences(self._spec, answer) or "what it tells of it is the same"

    def _ask(self, now: float) -> list[Send]:
        question = wire.SpecQuestion(self._spec.name, self._spec.hash, self._spec.marks)
        out = []
        for peer, stranger in self._strangers.items():
            may_be_asked = (
                stranger.reachable and stranger.there_since is None and stranger.asked < MAX_QUESTIONS
            )
            if may_be_asked and (not stranger.asked or now >= stranger.answer_by + ASK_AGAIN_SECONDS):
                stranger.asked += 1
                stranger.answer_by = now + ANSWER_SECONDS
                out.append(Send(peer, question))
        return out


def answer_of(spec: RunSpec, marks: bytes, seconds: float) -> wire.SpecAnswer:
    """Describe a spec to a peer whose tensors have these marks."""
    own = spec.marks
    starts = range(0, max(len(own), len(marks)), MARK_BYTES)
    differ = (at for at in starts if own[at : at + MARK_BYTES] != marks[at : at + MARK_BYTES])
    place = next((at // MARK_BYTES for at in differ), None)
    table = tuple(_table(spec, place).items())
    return wire.SpecAnswer(spec.name, spec.hash, seconds, PROTOCOL_VERSION, place, table)


def _table(spec: RunSpec, place: int | None) -> dict[str, str]:
    """The spec as names and values; of its tensors only the number, and the one at `place`."""
    tensors = spec.schema.tensors
    table = {}
    if place is not None and len(tensors) <= place < len(tensors) + len(spec.frozen):
        table[f"tensor {place}"] = spec.frozen[place - len(tensors)][:MAX_TERM_VALUE_CHARS]
    if place is not None and place < len(tensors):
        tensor = tensors[place]
        kind = " buffer" if tensor.buffer else ""
        table[f"tensor {place}"] = f"{tensor.name!a} {tensor.dtype} {list(tensor.shape)}{kind}"[
            :MAX_TERM_VALUE_CHARS
        ]
    table["model"] = f"{spec.schema.size} values in {len(tensors)} tensor{'' if len(tensors) == 1 else 's'}"
    table.update(spec.terms)
    options = msgspec.structs.asdict(spec.options)
    return table | {name.replace("_", " "): str(value) for name, value in options.items()}


def differences(here: RunSpec, there: wire.SpecAnswer) -> str:
    """Return the differences of two specs, one line; empty if the answer shows no difference."""
    if there.version != PROTOCOL_VERSION:
        older = "here" if there.version > PROTOCOL_VERSION else "there"
        return (
            f"protocol version: here {PROTOCOL_VERSION}, there {there.version}; "
            f"the equipoise {older} is older: upgrade it with pip install --upgrade equipoise"
        )
    ours, theirs = _table(here, there.place), dict(there.table)
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    whole = f"tensor {there.place}"  # Its name may be long, and must be whole.
    found = [
        (name == PLACES and _elsewhere(here, ours, theirs)) or _differs(name, ours, theirs, name == whole)
        for name in names[:MAX_DIFFERENCES]
    ]
    more = len(names) - MAX_DIFFERENCES
    return "; ".join(found) + (f"; and {more} more" if more > 0 else "")


def _differs(name: str, ours: Mapping[str, str], theirs: Mapping[str, str], whole: bool) -> str:
    here, there = ours.get(name, "nothing"), theirs.get(name, "nothing")
    if whole:
        return f"{name}: here {here}, there {there}"
    own, other = _settings(here), _settings(there)
    if own.keys() == other.keys():
        keys = [key for key in own if own[key] != other[key]][:MAX_DIFFERENCES]
        return f"{name}: " + "; ".join(_differs(key, own, other, False) for key in keys)
    pairs = enumerate(zip(here, there, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(here), len(there)))
    return f"{name}: here {_around(here, same)}, there {_around(there, same)}"


def _settings(text: str) -> dict[str, str]:
    """The values by name of a text as `lr=0.1, betas=(0.9, 0.999)`."""
    return dict(setting.partition("=")[::2] for setting in re.split(r", (?=\w+=)", text))


def _elsewhere(spec: RunSpec, here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The first parameter with another place, by the terms `PLACES`; empty if they do not tell."""
    ours, theirs = (terms.get(PLACES, "").split(" ")[-1] for terms in (here, there))
    if len(ours) != len(theirs) or ours == theirs:
        return ""
    at = next(at for at, (own, other) in enumerate(zip(ours, theirs, strict=True)) if own != other)
    names = [tensor.name for tensor in spec.schema.tensors if not tensor.buffer]
    several = math.ceil(len(names) / len(ours))
    if at * several >= len(names):
        return ""
    more = f" or one of the {several - 1} after it" if several > 1 else ""
    return f"{PLACES}: {names[at * several]!a}{more} has another place there"


def _around(text: str, place: int) -> str:
    """The text, if it is long only its part around `place`."""
    if len(text) <= MAX_SHOWN:
        return text
    start = max(min(place - LEAD, len(text) - MAX_SHOWN), 0)
    before, after = "..." if start else "", "..." if start + MAX_SHOWN < len(text) else ""
    return f"{before}{text[start : start + MAX_SHOWN]}{after}"
