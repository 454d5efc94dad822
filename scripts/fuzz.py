"""Feed each parser of bytes from elsewhere with values that are almost right: `scripts/fuzz.py --cases N --seed S`.

Cases are drawn from the types that a parser decodes to, then changed: as a tree of values, and as bytes. A parser may
refuse a case by the errors that `PARSERS` declares for it, within `SECONDS` and `GROWTH_BYTES`. What does more is
written to `tests/adversary/cases/PARSER/`, where a test parses it from then on.
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import json
import logging
import operator
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import inspect

from equipoise.averaging import pipeline
from equipoise.averaging.allreduce import messages as round_messages
from equipoise.averaging.manifest import SKETCH_BYTES, Manifest, ManifestError, are_near
from equipoise.averaging.matchmaking import messages as group_messages
from equipoise.averaging.messaging import messages as run_messages
from equipoise.averaging.options import Needs
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.replication import messages as transfer_messages
from equipoise.averaging.replication.update import _LENGTH, read_head
from equipoise.averaging.session.messages import decode_envelope, decode_hello
from equipoise.averaging.shared import messages as table_messages
from equipoise.averaging.shared.rows import unpacked
from equipoise.averaging.state import StateId
from equipoise.compression.spec import parse_codec
from equipoise.dht import admission, autonat, gate, messages, records
from equipoise.dht.address import AddressError, parse_address, parse_announce, parse_listen
from equipoise.dht.direct import credential
from equipoise.dht.direct.errors import Refused as DirectRefused
from equipoise.dht.direct.handshake import PREFACE_BYTES, parse_preface
from equipoise.dht.direct.listener import ORIGIN_BYTES, parse_origin
from equipoise.dht.identity import peer_of
from equipoise.dht.membership import BANS_FILE, Membership, bans
from equipoise.dht.options import FOLDER
from equipoise.dht.peer_cache import MEMORY_FILE, PeerCache, _Content
from equipoise.dht.punch import candidates
from equipoise.dht.relay import service
from equipoise.dht.sanitize import Malformed, decode
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.peer import config
from equipoise.peer.client import message_content
from equipoise.peer.client.safetensors_io import Entry, ImageError, pack, unpack
from equipoise.peer.control import messages as control
from equipoise.peer.control.socket import FrameDecoder
from equipoise.peer.daemon.history import ROUNDS_FILE, read_history
from equipoise.peer.errors import ControlError, EquipoiseError
from equipoise.peer.training import checkpoint_files, history, population
from equipoise.peer.training.feedback import read_residual
from equipoise.peer.training.image import ModelPart, OptimizerPart, TrainingState

SECONDS = 1.0
GROWTH_BYTES = 64 * 1024 * 1024
CASES = Path(__file__).resolve().parent.parent / "tests" / "adversary" / "cases"
PEER = peer_of(bytes(range(32)))
WORDS = (
    "",
    "a",
    "run",
    "0" * 16,
    "0" * 32,
    "0" * 64,
    PEER,
    f"/ip4/192.0.2.7/tcp/31337/p2p/{PEER}",
    "fp32",
    "::1 7",
    "mean",
    "average",
    "step",
    "int8:block=256",
    "/ip6/::1/tcp/0",
    "192.0.2.1 31337",
    "trainer",
    "\0\x1b[2J\n",
    "é" * 300,
)
WILD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    -(2**63),
    2**64 - 1,
    0.0,
    -0.0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    b"",
    b"\xff" * 64,
    [],
    {},
    [[]],
    {"": 0},
    "x" * 5000,
    "\ud800".encode("utf-8", "surrogatepass"),
)

FIXED = {
    ("Message", "version"): PROTOCOL_VERSION,
    ("Ask", "version"): PROTOCOL_VERSION,
    ("Answer", "version"): PROTOCOL_VERSION,
    ("Readiness", "version"): PROTOCOL_VERSION,
    ("Manifest", "format"): checkpoint_files.FORMAT,
    ("Readiness", "peer"): PEER,
    ("Message", "view"): "3.01234567",
}
"""Values of fields that let only one pass, by the struct's and the field's name."""

Chance = random.Random


class Parser(NamedTuple):
    """A function that is given bytes from elsewhere.

    Attributes:
        module: The module of the product that decodes.
        parse: Takes the bytes of a case.
        refusals: The errors by which it may refuse them.
        draw: Makes a case.
    """

    module: str
    parse: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    draw: Callable[[Chance], bytes]


# ---- values by their types ----


def value(kind: inspect.Type, chance: Chance, depth: int = 0) -> Any:
    """Draw a value of a type as what it is encoded from; mostly within its bounds, often at them."""
    few = chance.choice((0, 1, 1, 2, 3)) if depth < 6 else 0
    match kind:
        case inspect.UnionType(types):
            return value(chance.choice(types), chance, depth + (depth > 3))
        case inspect.IntType() | inspect.FloatType():
            low = kind.ge if kind.ge is not None else kind.gt if kind.gt is not None else 0
            high = kind.le if kind.le is not None else kind.lt if kind.lt is not None else low + 1000
            drawn = chance.choice((low, high, low + 1, (low + high) / 2, chance.uniform(low, high)))
            return int(drawn) if isinstance(kind, inspect.IntType) else float(drawn)
        case inspect.StrType():
            good = [word for word in WORDS if kind.pattern is None or re.search(kind.pattern, word)]
            return chance.choice(good or WORDS)[: kind.max_length]
        case inspect.BytesType() | inspect.ByteArrayType() | inspect.MemoryViewType():
            low = kind.min_length or 0
            high = low + few * 16 if kind.max_length is None else kind.max_length
            return chance.randbytes(chance.choice((low, min(high, low + 32), min(high, 4096))))
        case inspect.StructType():
            found: dict[Any, Any] = {} if kind.tag is None else {kind.tag_field: kind.tag}
            for field in kind.fields:
                drawn = value(field.type, chance, depth + 1)
                found[field.encode_name] = FIXED.get((kind.cls.__name__, field.name), drawn)
            return list(found.values()) if kind.array_like else found
        case inspect.TupleType(types):
            return [value(one, chance, depth + 1) for one in types]
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return [value(kind.item_type, chance, depth + 1) for _ in range(max(few, kind.min_length or 0))]
        case inspect.DictType():
            return {
                value(kind.key_type, chance, depth + 1): value(kind.value_type, chance, depth + 1)
                for _ in range(few)
            }
        case inspect.LiteralType(values):
            return chance.choice(values)
        case inspect.BoolType():
            return chance.random() < 0.5
        case inspect.Metadata(inner):
            return value(inner, chance, depth)
        case inspect.NoneType():
            return None
    return chance.choice(WILD)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a tree of values with each key or index of it."""
    keys = range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ()
    for key in keys:
        yield tree, key
        yield from places(tree[key])


def changed(tree: Any, chance: Chance) -> Any:
    """Change a few places of a tree."""
    root: list[Any] = [tree]
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
        at, key = chance.choice(list(places(root)))
        match chance.randrange(6):
            case 0:
                del at[key]
                root = root or [None]
            case 1 if isinstance(at, list):
                at.insert(key, at[key])
            case 2:
                for _ in range(chance.choice((1, 10, 600))):
                    at[key] = [at[key]]
                break  # Nobody walks through that.
            case 3 if isinstance(at[key], bytes | str | list):
                at[key] = at[key] * chance.choice((0, 2, 50))
            case 4:
                at[key] = chance.choice(list(places(root)))[0]
                break  # It may hold itself.
            case _:
                at[key] = chance.choice(WILD)
    return root[0]


def bent(data: bytes, chance: Chance) -> bytes:
    """Change a few bytes, in one case of three."""
    for _ in range(chance.choice((0, 0, 0, 0, 0, 0, 1, 3))):
        at = chance.randrange(len(data) + 1)
        piece = chance.choice((b"", data[:at], chance.randbytes(1), b"\xff" * 4, b"\xdf\xff\xff\xff\xff"))
        data = data[:at] + piece + data[at + chance.choice((0, 1, len(piece))) :]
    return data


def packed(tree: Any, chance: Chance, encode: Callable[[Any], bytes] = msgspec.msgpack.encode) -> bytes:
    """Encode a tree, changed."""
    try:
        return bent(encode(changed(tree, chance)), chance)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError):
        return bent(encode([]), chance)  # No encoder would write such a tree.


def of(kind: Any, encode: Callable[[Any], bytes] = msgspec.msgpack.encode) -> Callable[[Chance], bytes]:
    """Return what draws encoded values of a type."""
    told = inspect.type_info(kind)
    return lambda chance: packed(value(told, chance), chance, encode)


# ---- cases that have more than one layer ----

_json = msgspec.json.encode


def _lines(chance: Chance) -> bytes:
    return bent(" ".join(chance.choices(WORDS, k=chance.choice((1, 1, 1, 2)))).encode(), chance)


def _bytes(size: int) -> Callable[[Chance], bytes]:
    heads = (b"EQPD\x06\x01", b"EQPD\x06\x02", b"1.2.3.4 77", b"")
    return lambda chance: bent(chance.choice(heads).ljust(size), chance)


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode(errors="surrogateescape"))


def _sealed(chance: Chance) -> bytes:
    envelope = value(inspect.type_info(records.Envelope), chance)
    return packed(envelope | {"payload": of(records.Readiness)(chance)}, chance)


def _line(chance: Chance) -> bytes:
    data = of(admission.Invitation)(chance)
    checked = data + hashlib.sha256(data).digest()[:6]
    return admission.PREFIX.encode() + base64.urlsafe_b64encode(checked).rstrip(b"=")


def _head(chance: Chance) -> bytes:
    manifest = of(Manifest)(chance)
    length = chance.choice((len(manifest),) * 4 + (0, 2**32 - 1))
    return bent(_LENGTH.pack(length) + manifest + bytes([3, 0, 0, 0, 0, 0, 0, 0]) + bytes(99), chance)


def _safetensors(chance: Chance) -> bytes:
    entries = {name: value(inspect.type_info(Entry), chance) for name in chance.choice(("", "w"))}
    good = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = packed({"a": good, **entries, "__metadata__": {"equipoise": "{}"}}, chance, _json)
    size = chance.choice((len(header),) * 5 + (0, 2**63))
    return bent(size.to_bytes(8, "little") + header + bytes(24), chance)


def _trained() -> TrainingState:
    """Return the state of a small training that has stepped once."""
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    named = dict(model.named_parameters())
    return TrainingState(ModelPart(named, {}), {"optimizer": OptimizerPart(optimizer, named)})


def _residual(chance: Chance) -> bytes:
    """An image of a residual, with the id of a state."""
    state = of(StateId, _json)(chance).decode(errors="replace")
    return bytes(pack({"w": torch.zeros(chance.randint(0, 3))}, {"state": state}).numpy())


def _imaged(chance: Chance) -> bytes:
    """Change the header of an image, and the tree that its metadata hold."""
    image = bytes(_STATE.image(StateId(3, "a" * 64)).numpy())
    end = 8 + int.from_bytes(image[:8], "little")
    header = msgspec.json.decode(image[8:end])
    about = msgspec.json.decode(header["__metadata__"]["equipoise"])
    header["__metadata__"]["equipoise"] = packed(about, chance, _json).decode(errors="replace")
    text = packed(header, chance, _json) if chance.random() < 0.3 else _json(header)
    return bent(len(text).to_bytes(8, "little") + text + image[end:], chance)


def _content(chance: Chance) -> bytes:
    """A message between scripts whose fields, and what is told of encoded tensors, are changed."""
    coded = packed({"w": ["F32", [2, 3]]}, chance, _json).decode(errors="replace")
    fields = packed({"a": 1, "b": [{}]}, chance, _json).decode(errors="replace")
    about = {
        "codec": chance.choice(("int8:block=128", "nf4", "sparse", "x")),
        "coded": coded,
        "fields": fields,
    }
    size = chance.choice((132, 132, 6, 0))
    return bent(bytes(pack({"w": torch.zeros(size, dtype=torch.uint8)}, about).numpy()), chance)


def _relayed(chance: Chance) -> bytes:
    peer = {"id": chance.randbytes(chance.choice((0, 38, 500)))}
    return bent(service.Hop(kind=chance.randrange(5), peer=peer, status=100).SerializeToString(), chance)


def _framed(chance: Chance) -> bytes:
    frame = packed([7, of(Any)(chance)], chance)
    return bent(control.LENGTH.pack(len(frame)) + frame, chance)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)


def _filed(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return what puts a case in a file of a home, and has it read."""

    def parse(data: bytes) -> object:
        path = _HOME / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)
        return read(_HOME)

    return parse


def _checked(data: bytes) -> None:
    manifest = getattr(group_messages.decode(data), "manifest", None)
    if isinstance(manifest, Manifest):
        spec = manifest.members[0].spec if manifest.members else ""
        manifest.check(lambda *_: True, spec=spec, needs=Needs(4), own=None)


def _token(data: bytes) -> None:
    admission.Token.decode(bytes(32), PEER, data).check(0.0, ())


def _asked(data: bytes) -> None:
    control.decode_request(control.decode_number(data)[1])


_requests = inspect.type_info(functools.reduce(operator.or_, control._requests))
_STATE = _trained()
_HOME = Path(tempfile.mkdtemp(prefix="fuzz-"))
_refused, _malformed = admission.Refused, (Malformed,)
PARSERS = {
    "group": Parser(
        "averaging.matchmaking.messages",
        _checked,
        (FrameRefused, ManifestError),
        of(group_messages.MatchmakingMessage),
    ),
    "round": Parser(
        "averaging.allreduce.messages",
        round_messages.decode,
        (FrameRefused,),
        of(round_messages.RoundMessage),
    ),
    "transfer": Parser(
        "averaging.replication.messages",
        transfer_messages.decode,
        (FrameRefused,),
        of(transfer_messages.TransferMessage),
    ),
    "message": Parser(
        "averaging.messaging.messages",
        run_messages.decode,
        (FrameRefused,),
        of(run_messages.RunMessage),
    ),
    "content": Parser(
        "peer.client.message_content",
        lambda data: message_content.decode(_tensor(data)),
        (ImageError,),
        _content,
    ),
    "mean": Parser(
        "averaging.replication.update",
        lambda data: read_head(memoryview(data)),
        (ValueError, FrameRefused),
        _head,
    ),
    "hello": Parser(
        "averaging.session.messages",
        decode_hello,
        (FrameRefused,),
        lambda chance: bent(b"H" + bytes(24), chance),
    ),
    "envelope": Parser(
        "averaging.session.messages",
        decode_envelope,
        (FrameRefused,),
        lambda chance: bent(b"F" + bytes(16), chance),
    ),
    "sketch": Parser(
        "averaging.manifest",
        lambda data: are_near(data, bytes(SKETCH_BYTES)),
        (),
        lambda chance: bent(bytes(SKETCH_BYTES), chance),
    ),
    "record": Parser("dht.records", records.unseal, _malformed, _sealed),
    "call": Parser(
        "dht.messages",
        lambda data: messages.decode(data, messages.messages),
        _malformed,
        of(messages.Message),
    ),
    "dialback": Parser(
        "dht.autonat", lambda data: messages.decode(data, autonat._asks), _malformed, of(autonat.Ask)
    ),
    "witness": Parser(
        "dht.autonat", lambda data: messages.decode(data, autonat._answers), _malformed, of(autonat.Answer)
    ),
    "punch": Parser("dht.punch.candidates", candidates.decode, _malformed, of(candidates.Message)),
    "credential": Parser("dht.direct.credential", credential.parse, (DirectRefused,), of(tuple[str, ...])),
    "preface": Parser(
        "dht.direct.handshake",
        lambda data: parse_preface(data.ljust(PREFACE_BYTES)[:PREFACE_BYTES]),
        (DirectRefused,),
        _bytes(PREFACE_BYTES),
    ),
    "origin": Parser("dht.direct.listener", parse_origin, (DirectRefused,), _bytes(ORIGIN_BYTES)),
    "relay": Parser(
        "dht.relay.service", lambda data: service.decode(data, service.Hop), _malformed, _relayed
    ),
    "token": Parser("dht.admission", _token, (_refused,), of(tuple[tuple[admission.Link, ...], bytes])),
    "invitation": Parser("dht.admission", _text(admission.parse_invitation), (_refused,), _line),
    "revoked": Parser(
        "dht.admission",
        lambda data: admission.Revocations.decode(data, bytes(32)),
        (_refused,),
        of(admission.Revocations),
    ),
    "presented": Parser(
        "dht.gate",
        lambda data: decode(gate.answers, data, gate.MAX_ANSWER_BYTES),
        _malformed,
        of(tuple[bytes, Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)], bytes]),
    ),
    "address": Parser("dht.address", _text(parse_address), (AddressError,), _lines),
    "listen": Parser("dht.address", _text(parse_listen), (AddressError,), _lines),
    "announce": Parser("dht.address", _text(parse_announce), (AddressError,), _lines),
    "codec": Parser("compression.spec", _text(parse_codec), (ValueError,), _lines),
    "membership": Parser(
        "dht.membership",
        _filed(f"{FOLDER}/x", lambda home: Membership.load(home, "x", 0.0)),
        (_refused,),
        of(Membership),
    ),
    "bans": Parser("dht.membership", _filed(BANS_FILE, bans), (_refused,), of(dict[str, str], _json)),
    "memory": Parser("dht.peer_cache", _filed(MEMORY_FILE, PeerCache), (), of(_Content, _json)),
    "request": Parser(
        "peer.control.messages",
        _asked,
        (ControlError,),
        lambda chance: packed([7, value(_requests, chance)], chance),
    ),
    "frame": Parser("peer.control.socket", lambda data: FrameDecoder().feed(data), (ControlError,), _framed),
    "image": Parser(
        "peer.client.safetensors_io", lambda data: unpack(_tensor(data)), (ImageError,), _safetensors
    ),
    "residual": Parser(
        "peer.training.feedback", lambda data: read_residual(_tensor(data)), (ImageError,), _residual
    ),
    "state": Parser(
        "peer.training.image",
        lambda data: _STATE.read(_tensor(data), foreign=True),
        (ImageError,),
        _imaged,
    ),
    "records": Parser(
        "peer.training.history",
        lambda data: history.History._decoded({"records": _tensor(data)}),
        (ImageError,),
        of(list[history.Agreed]),
    ),
    "member": Parser(
        "peer.training.population",
        lambda data: msgspec.convert(json.loads(data), population.Note),
        (ValueError, msgspec.MsgspecError, RecursionError),
        of(population.Note, _json),
    ),
    "stage": Parser(
        "peer.training.pipeline",
        lambda data: msgspec.convert(json.loads(data), pipeline.Note),
        (ValueError, msgspec.MsgspecError, RecursionError),
        of(pipeline.Stand, _json),
    ),
    "table": Parser(
        "averaging.shared.rows",
        lambda data: unpacked({"0 a": torch.zeros(3)}, json.loads(data)),
        (ValueError, msgspec.MsgspecError, RecursionError),
        of(table_messages.Message, _json),
    ),
    "checkpoint": Parser(
        "peer.training.checkpoint_files",
        _filed(checkpoint_files.MANIFEST_FILE, checkpoint_files.read_manifest),
        (EquipoiseError,),
        of(checkpoint_files.Manifest, _json),
    ),
    "history": Parser(
        "peer.daemon.history", _filed(ROUNDS_FILE, read_history), (), of(dict[str, Any], _json)
    ),
    "config": Parser(
        "peer.config",
        _filed(config.FILE_NAME, lambda home: config.load({"home": home}, {})),
        (EquipoiseError,),
        _lines,
    ),
}
"""Every parser of bytes that come from other peers, clients or files, by a short name."""

TRUSTED = {
    "averaging.ports": "makes the parsers of the messages",
    "dht.streams": "the kernel's answers",
    "dht.p2pd_client": "p2pd, a child of the daemon",
    "dht.transport": "two lengths, both bounded",
    "dht.direct.aead": "a length, which is authenticated",
    "peer.home": "the kernel's answers",
    "peer.demo.swarm": "the demo's own children",
    "peer.demo.trainer": "the demo's own parent",
    "peer.training.dcp": "the image of this very training",
    "peer.daemon.run_daemon": "the daemon's own child",
}
"""Modules with decoders that need no case, each with the reason."""


_RESET = Path("/proc/self/clear_refs")
"""Takes 5 as the wish to forget the peak: a process that once held more would hide what a case takes."""


def _peak() -> int:
    """The most resident bytes of this process since the last reset."""
    told = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(told[1]) * 1024 if told else 0


def fault(parser: Parser, data: bytes) -> str:
    """Parse one case; return what is wrong with that, one line, or nothing."""
    _RESET.write_text("5")
    before, began = _peak(), time.perf_counter()
    try:
        parser.parse(data)
    except parser.refusals:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]!r}"
    took = time.perf_counter() - began
    grown = _peak() - before
    if took > SECONDS or grown > GROWTH_BYTES:
        return f"it took {took:.2f} s and {grown / 2**20:.0f} MiB"
    return ""


def search(cases: int, seed: int, parsers: dict[str, Parser] = PARSERS) -> Iterator[tuple[str, bytes, str]]:
    """Yield what is found in so many cases: the parser's name, the bytes, and what is wrong; of each kind the first."""
    chance, known = Chance(seed), set()
    names = sorted(parsers)
    for number in range(cases):
        name = names[number % len(names)]
        data = parsers[name].draw(chance)
        what = fault(parsers[name], data)
        if what and (name, what.partition(":")[0]) not in known:
            known.add((name, what.partition(":")[0]))
            yield name, data, what


def main() -> int:
    """Search, and write what is found as cases of a test."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--cases", type=int, default=10_000)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--out", type=Path, default=CASES, help="where cases are written")
    given, began, found = flags.parse_args(), time.perf_counter(), 0
    logging.disable()  # Some parsers log what they refuse.
    for name, data, what in search(given.cases, given.seed):
        path = given.out / name / hashlib.sha256(data).hexdigest()[:16]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        print(f"{name}: {what}; written to {path}")
        found += 1
    print(f"{given.cases} cases of seed {given.seed}, {found} faults, {time.perf_counter() - began:.1f} s")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
