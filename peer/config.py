"""The settings of this machine alone, from a TOML file < environment < flags, each value with its origin."""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from configparser import RawConfigParser
from pathlib import Path
from typing import Annotated, Any

import msgspec
import platformdirs

from equipoise.dht.address import AddressError, parse_address, parse_announce, parse_listen
from equipoise.dht.sanitize import read_regular
from equipoise.dht.state import MAX_TAG_CHARACTERS, MAX_TAGS, BootstrapStatus, Tags
from equipoise.peer.errors import ConfigError, FlagError

ENV_PREFIX = "EQUIPOISE_"
HOME_ENV = ENV_PREFIX + "HOME"
RESUME_ENV = ENV_PREFIX + "RESUME"
"""Set to 1 for a training script that is to start from its newest checkpoint."""
FILE_NAME = "config.toml"

MAX_FILE_BYTES = 64 * 1024
"""Most bytes of a configuration file: it has some lines."""

MAX_BANDWIDTH = 1e13
"""As in `equipoise.averaging.manifest`, which takes long to import."""

MAX_ADDRESSES = 64
"""More bootstrap addresses than that only slow down the start."""

RATES = ("bandwidth", "relay_bandwidth")
"""Keys whose values are bytes per second, also written as in "10MB/s" or "80Mbit/s"."""

_RATE = re.compile(
    r"(?P<amount>\d+(\.\d*)?)\s*(?P<prefix>[kKmMgGtT]i?)?((?P<bits>[Bb]its?|bps)|B|[Bb]ytes?|Bps)?(/s)?"
)

LOG_LEVELS = ("debug", "info", "warning", "error")

CHANNELS = ("aead", "tls")
"""Encryptions of bulk data on direct channels: larger records of our own after a TLS handshake, or TLS' own."""

CPU = "cpu"
"""Name of the device on which a daemon reduces by default."""

Address = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of this machine alone; none is hashed or must be equal elsewhere.

    Attributes:
        home: Directory of identity, control socket and log.
        name: Name of this daemon for people; shown by `status`.
        join: Addresses of daemons to join the swarm through; tried all, again and again.
        listen: Multiaddresses to listen on; port 0 is any free one, which is kept in the home.
        direct_listen: Multiaddresses for the direct channels of rounds; by default a port of each `listen`'s host.
        announce: Multiaddresses to tell others instead of those listened on, for a router that forwards ports.
        upnp: Whether to ask the router to forward a port; None: where this machine has private addresses only.
        channel: Encryption of direct channels: one of `CHANNELS`.
        client_mode: Whether this machine cannot be dialled: it then contributes and receives, and owns no share.
        relay: Whether to relay for peers that cannot be dialled.
        relay_bandwidth: Bytes per second that are relayed at most.
        log_level: Least severe of what is logged.
        bandwidth: Bytes per second that this machine can send; 0 if unknown.
        device: Where the daemon computes means: "cpu", "cuda" or "cuda:N". Other rules than the mean stay on the CPU.
        tags: Properties of this machine, as "gpu"; a federated run may draw only peers that carry its tags.
    """

    home: str
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    join: Addresses = ()
    listen: Addresses = ()
    direct_listen: Addresses = ()
    announce: Addresses = ()
    upnp: bool | None = None
    channel: str = CHANNELS[0]
    client_mode: bool = False
    relay: bool = False
    relay_bandwidth: Annotated[float, msgspec.Meta(gt=0)] = 12.5e6
    log_level: str = "info"
    bandwidth: Annotated[float, msgspec.Meta(ge=0, le=MAX_BANDWIDTH)] = 0.0
    device: Annotated[str, msgspec.Meta(pattern=r"\A(cpu|cuda(:[0-9]{1,2})?)\Z")] = CPU
    tags: Tags = ()


class Setting(msgspec.Struct, frozen=True):
    """One value of the configuration and where it came from."""

    key: str
    value: Any
    origin: str


class Loaded(msgspec.Struct, frozen=True):
    """A configuration with the origin of each value.

    Attributes:
        config: The configuration; of `join` only the well-formed addresses.
        settings: Every value as given, with its origin.
        malformed: The other addresses of `join`: a daemon that nobody watches starts without them and says why.
        warnings: Likely mistakes in the environment.
    """

    config: Config
    settings: tuple[Setting, ...]
    malformed: tuple[BootstrapStatus, ...] = ()
    warnings: tuple[str, ...] = ()


KEYS = tuple(field for field in Config.__struct_fields__ if field != "home")
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Config)}
_BOOLEANS = (bool, bool | None)
_LISTS = (Addresses, Tags)
_FLAGS = {"tags": "tag"}
"""Flags that are not called as their keys."""
_CHOICES = {"log_level": LOG_LEVELS, "channel": CHANNELS}


def find_home(
    flag: str | os.PathLike[str] | None, environ: Mapping[str, str], style: str = "flag --"
) -> tuple[Path, str]:
    """The home and the origin of that choice: the flag, else `$EQUIPOISE_HOME`, else the default."""
    if flag is not None:
        return Path(flag).expanduser().absolute(), f"{style}home"
    if environ.get(HOME_ENV):
        return Path(environ[HOME_ENV]).expanduser().absolute(), f"environment {HOME_ENV}"
    return Path(platformdirs.user_data_dir("equipoise", appauthor=False)), "default"


def load(
    flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, style: str = "flag --"
) -> Loaded:
    """Read the configuration of a daemon, from the process's own environment by default.

    `flags` are values by key, `home` included; None means not given. `style` begins the name of a flag's origin.

    Raises:
        ConfigError: A key is unknown, a value has the wrong type or is out of its range, or an address is malformed
            that was given as a flag or to listen on. FlagError if it is a flag's value.
    """
    environ = os.environ if environ is None else environ
    home, home_origin = find_home(flags.get("home"), environ, style)
    settings = {"home": Setting("home", str(home), home_origin)}
    settings["name"] = Setting("name", socket.gethostname()[:64] or "equipoise", "default")
    for key, value, origin in [
        *_from_file(home / FILE_NAME),
        *_from_environment(environ),
        *_from_flags(flags, style),
    ]:
        settings[key] = Setting(key, _checked(key, value, origin), origin)
    config = Config(**{key: setting.value for key, setting in settings.items()})
    if config.relay and config.client_mode:
        origins = f"{settings['relay'].origin}, {settings['client_mode'].origin}"
        problem = "a daemon in client mode cannot relay: nobody can dial it"
        raise _wrong(origins, problem, "leave out one of them")
    malformed = _malformed(config, settings, tolerant=not flags.get("join"))
    for key in KEYS:
        settings.setdefault(key, Setting(key, getattr(config, key), "default"))
    bad = {one.address for one in malformed}
    config = msgspec.structs.replace(config, join=tuple(one for one in config.join if one not in bad))
    return Loaded(config, tuple(settings[key] for key in ("home", *KEYS)), malformed, _lookalikes(environ))


def _wrong(origin: str, problem: str, hint: str = "") -> ConfigError:
    kind = FlagError if "flag --" in origin else ConfigError
    return kind(f"{origin}: {problem}", hint)


def _closest(word: str, known: Sequence[str]) -> str:
    """The question whether the closest of the known words was meant, else all of them."""
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def _from_file(path: Path) -> list[tuple[str, Any, str]]:
    try:
        content = read_regular(path, MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):  # A home that cannot be is refused when it is taken.
        return []
    except OSError as error:
        hint = "make it a readable file or remove it"
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes", "is it the right file?")
    try:
        table = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path} is not valid TOML: {why}", "correct it or remove it") from None
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key[:64]!r}", _closest(key, KEYS))
    return [(key, value, f"file {path}") for key, value in table.items()]


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    for key in KEYS:
        name = ENV_PREFIX + key.upper()
        text = environ.get(name)
        if text:
            value: Any = text
            if _TYPES[key] in _LISTS:
                value = text.replace(",", " ").split()
            elif _TYPES[key] in _BOOLEANS:
                value = RawConfigParser.BOOLEAN_STATES.get(text.strip().lower(), text)
            yield key, value, f"environment {name}"


def _from_flags(flags: Mapping[str, Any], style: str) -> list[tuple[str, Any, str]]:
    for key in flags:
        if key not in ("home", *KEYS):
            raise ConfigError(f"unknown setting {key[:64]!r}", _closest(key, ("home", *KEYS)))
    given = {key: value for key, value in flags.items() if value not in (None, ()) and key != "home"}
    return [
        (key, value, style + (_FLAGS.get(key, key.replace("_", "-")) if style.endswith("-") else key))
        for key, value in given.items()
    ]


def _checked(key: str, value: Any, origin: str) -> Any:
    """The value as the daemon takes it."""
    hint, choices = "", _CHOICES.get(key)
    try:
        if key in RATES and isinstance(value, str):
            value = _bytes_per_second(value)
        if isinstance(value, list | tuple):
            value = [one.strip() if isinstance(one, str) else one for one in value]
        checked = msgspec.convert(value, _TYPES[key])
        if isinstance(checked, float) and not math.isfinite(checked):
            raise ValueError("not finite")
        if key == "name" and not checked.isprintable():
            raise ValueError("not printable")
        if choices and checked not in choices:
            hint = _closest(checked, choices)
            raise ValueError("not one of them")
        return checked
    except ValueError:
        if key in RATES and re.search(r"[kKmMgGtT]i?b(/s)?$", str(value).strip()):
            hint = "write B for bytes or bit for bits"
        if key == "device":
            hint = "leave it out to reduce on the CPU"
        # The name of a flag or a variable identifies the setting.
        place = f"{origin}: {key}" if origin.startswith("file ") else origin
        raise _wrong(place, f"expected {_expected(key)}, got {_shown(value)}", hint) from None


def _expected(key: str) -> str:
    if key in RATES:
        return 'a rate such as "10MB/s" or "80Mbit/s" (up to 10TB/s), or a number of bytes per second'
    if key in _CHOICES:
        return " or ".join(_CHOICES[key])
    if _TYPES[key] in _BOOLEANS:
        return "true or false"
    if key == "device":
        return "cpu, cuda or cuda:N"
    if _TYPES[key] is Addresses:
        return f'a list of at most {MAX_ADDRESSES} addresses, such as ["ADDRESS"]'
    if _TYPES[key] is Tags:
        word = f"1 to {MAX_TAG_CHARACTERS} letters, digits, dots, dashes or underscores"
        return f'a list of at most {MAX_TAGS} words of {word}, such as ["gpu"]'
    return "1 to 64 printable characters"


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 64 else text[:61] + "..."


def _bytes_per_second(text: str) -> float:
    """Read a number of bytes per second, or a rate with its unit.

    The form is checked here, because "10Mb/s" is ambiguous.

    Raises:
        ValueError: It is neither.
    """
    try:
        return float(text)
    except ValueError:
        found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    prefix = (found["prefix"] or "").lower()
    unit = (1024 if prefix.endswith("i") else 1000) ** " kmgt".index(prefix[:1] or " ")
    return int(float(found["amount"]) * unit) / (8 if found["bits"] else 1)


def _malformed(
    config: Config, settings: Mapping[str, Setting], tolerant: bool
) -> tuple[BootstrapStatus, ...]:
    if not (config.join or config.listen or config.direct_listen or config.announce):
        return ()
    parsers = {"listen": parse_listen, "direct_listen": parse_listen, "announce": parse_announce}
    for key, parse in parsers.items():
        for address in getattr(config, key):
            try:
                parse(address)
            except AddressError as error:
                raise _wrong(settings[key].origin, str(error)) from error
    found = []
    for address in config.join:
        try:
            parse_address(address)
        except AddressError as error:
            origin = settings["join"].origin
            if not tolerant:
                raise _wrong(origin, str(error)) from error
            found.append(BootstrapStatus(address, "malformed", f"{origin}: {error}", 0))
    return tuple(found)


def _lookalikes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Warn of variables that resemble ours; others may share the prefix for good reasons."""
    known = [HOME_ENV, RESUME_ENV, *(ENV_PREFIX + key.upper() for key in KEYS)]
    warnings = []
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, 1, cutoff=0.85)
            if close:
                warnings.append(f"environment variable {name} is not known; did you mean {close[0]}?")
    return tuple(warnings)
