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
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import platformdirs

from equipoise.dht.address import AddressError, parse_address, parse_announce, parse_listen
from equipoise.dht.options import MAX_ADDRESSES, Addresses, Layer, SwarmOptions, names
from equipoise.dht.sanitize import read_regular
from equipoise.dht.state import BootstrapStatus
from equipoise.limits import MAX_TAG_CHARACTERS, MAX_TAGS, Tags
from equipoise.peer.errors import ConfigError, FlagError

ENV_PREFIX = "EQUIPOISE_"
HOME_ENV = ENV_PREFIX + "HOME"
RESUME_ENV = ENV_PREFIX + "RESUME"
"""Set to 1 for a training script that is to start from its newest checkpoint."""
FILE_NAME = "config.toml"

MAX_FILE_BYTES = 64 * 1024
"""Most bytes of a configuration file: it has some lines."""

RATES = ("upload", "download", "relay_bandwidth")
"""Keys whose values are bytes per second, also written as in "10MB/s" or "80Mbit/s"."""

_RATE = re.compile(
    r"(?P<amount>\d+(\.\d*)?)\s*(?P<prefix>[kKmMgGtT]i?)?((?P<bits>[Bb]its?|bps)|B|[Bb]ytes?|Bps)?(/s)?"
)

LogLevel = Literal["debug", "info", "warning", "error"]

CHANNELS = get_args(Layer)
"""Encryptions of bulk data on direct channels."""

CPU = "cpu"
"""Name of the device on which a daemon reduces by default."""


LOOPBACK = r"\A((127(\.[0-9]{1,3}){3}|\[::1\]):[0-9]{1,5})?\Z"
"""Where figures may be read: nobody asks their reader for a name."""


class Config(SwarmOptions, frozen=True, kw_only=True):
    """The settings of this machine alone: those of its swarm, and these. None is hashed or must be equal elsewhere.

    Attributes:
        home: Directory of identity, control socket and log.
        log_level: Least severe of what is logged.
        device: Where means are computed: cpu, or a GPU as cuda or cuda:0. Other rules stay on the CPU.  [default: cpu]
        metrics: Where Prometheus reads figures, as 127.0.0.1:9464: an address of this machine alone.  [default: off]
    """

    home: str
    log_level: LogLevel = "info"
    device: Annotated[str, msgspec.Meta(pattern=r"\A(cpu|cuda(:[0-9]{1,2})?)\Z")] = CPU
    metrics: Annotated[str, msgspec.Meta(pattern=LOOPBACK)] = ""


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
TYPES = {field.name: field.type for field in msgspec.structs.fields(Config)}
BOOLEANS = (bool, bool | None)
LISTS = (Addresses, Tags)
CHOICES = {"log_level": get_args(LogLevel), "channel": CHANNELS}
HELP = {
    key: " ".join(text.split())
    for kind in (SwarmOptions, Config)
    for key, text in re.findall(r"^ {4}(\w+): (.+(?:\n {5}.+)*)", cleandoc(kind.__doc__ or ""), re.MULTILINE)
}
"""What each setting is, for people: the documentation of its attribute."""


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
    if config.invite:  # The line is a secret; what is shown need not have it.
        settings["invite"] = msgspec.structs.replace(settings["invite"], value=config.invite[:16] + "...")
    return Loaded(
        config,
        tuple(settings[key] for key in ("home", *KEYS)),
        malformed,
        _lookalikes(environ) + _left_out(config),
    )


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
            if TYPES[key] in LISTS:
                value = text.replace(",", " ").split()
            elif TYPES[key] in BOOLEANS:
                value = RawConfigParser.BOOLEAN_STATES.get(text.strip().lower(), text)
            yield key, value, f"environment {name}"


def _from_flags(flags: Mapping[str, Any], style: str) -> list[tuple[str, Any, str]]:
    for key in flags:
        if key not in ("home", *KEYS):
            raise ConfigError(f"unknown setting {key[:64]!r}", _closest(key, ("home", *KEYS)))
    given = {key: value for key, value in flags.items() if value not in (None, ()) and key != "home"}
    return [
        (key, value, style + (flag_of(key) if style.endswith("-") else key)) for key, value in given.items()
    ]


def flag_of(key: str) -> str:
    """The flag of a setting, without its dashes."""
    return "tag" if key == "tags" else key.replace("_", "-")


def _checked(key: str, value: Any, origin: str) -> Any:
    """The value as the daemon takes it."""
    hint = ""
    try:
        if key in RATES and isinstance(value, str):
            value = bytes_per_second(value)
        if isinstance(value, list | tuple):
            value = [one.strip() if isinstance(one, str) else one for one in value]
        checked = msgspec.convert(value, TYPES[key])
        if isinstance(checked, float) and not math.isfinite(checked):
            raise ValueError("not finite")
        if key == "name" and not checked.isprintable():
            raise ValueError("not printable")
        return checked
    except ValueError:
        if key in RATES and re.search(r"[kKmMgGtT]i?b(/s)?$", str(value).strip()):
            hint = "write B for bytes or bit for bits"
        if key in CHOICES and isinstance(value, str):
            hint = _closest(value, CHOICES[key])
        if key == "device":
            hint = "leave it out to reduce on the CPU"
        # The name of a flag or a variable identifies the setting.
        place = f"{origin}: {key}" if origin.startswith("file ") else origin
        raise _wrong(place, f"expected {_expected(key)}, got {_shown(value)}", hint) from None


def _expected(key: str) -> str:
    if key in RATES:
        return 'a rate such as "10MB/s" or "80Mbit/s" (up to 10TB/s), or a number of bytes per second'
    if key in CHOICES:
        return " or ".join(CHOICES[key])
    if TYPES[key] in BOOLEANS:
        return "true or false"
    if key == "device":
        return "cpu, cuda or cuda:N"
    if TYPES[key] is Addresses:
        return f'a list of at most {MAX_ADDRESSES} addresses, such as ["ADDRESS"]'
    if TYPES[key] is Tags:
        word = f"1 to {MAX_TAG_CHARACTERS} letters, digits, dots, dashes or underscores"
        return f'a list of at most {MAX_TAGS} words of {word}, such as ["gpu"]'
    told = {
        "swarm": "the name of a swarm that this home has joined",
        "invite": "an invitation, one line",
        "metrics": "an address of this machine alone, such as 127.0.0.1:9464",
    }
    return told.get(key, "1 to 64 printable characters")


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 64 else text[:61] + "..."


def bytes_per_second(text: str) -> float:
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


def _left_out(config: Config) -> tuple[str, ...]:
    """Warn of a daemon in the open swarm whose home was invited to a private one."""
    if config.swarm or config.invite:
        return ()
    held = names(Path(config.home))
    told = "this home is in the private swarm {0}, and this daemon in the open one: {0} needs --swarm {0}"
    return tuple(told.format(name) for name in held)
