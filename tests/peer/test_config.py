from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from equipoise.compression.grammar import MAX_WORD_CHARS, MAX_WORDS
from equipoise.dht.address import EXAMPLE, LISTEN_EXAMPLE
from equipoise.limits import MAX_TAG_CHARACTERS, MAX_TAGS
from equipoise.peer.config import MAX_FILE_BYTES, Loaded, find_home, load
from equipoise.peer.errors import ConfigError


def origins(loaded: Loaded) -> dict[str, str]:
    return {setting.key: setting.origin for setting in loaded.settings}


def with_file(home: Path, text: str) -> dict[str, Any]:
    (home / "config.toml").write_text(text)
    return {"home": home}


def test_defaults(tmp_path: Path) -> None:
    loaded = load({"home": tmp_path}, {})

    assert loaded.config.home == str(tmp_path)
    assert loaded.config.name
    assert loaded.config.join == ()
    assert set(origins(loaded).values()) == {"flag --home", "default"}


def test_flags_win_over_environment_wins_over_file(tmp_path: Path) -> None:
    flags = with_file(tmp_path, 'name = "file"\nlog_level = "error"\nupload = 5\nclient_mode = true\n')
    environ = {"EQUIPOISE_NAME": "environment", "EQUIPOISE_LOG_LEVEL": "warning"}

    loaded = load({**flags, "name": "flag", "client_mode": None, "join": ()}, environ)

    config = loaded.config
    assert (config.name, config.log_level, config.upload, config.client_mode) == (
        "flag",
        "warning",
        5.0,
        True,
    )
    assert origins(loaded) == {
        "home": "flag --home",
        "name": "flag --name",
        "tags": "default",
        "join": "default",
        "listen": "default",
        "direct_listen": "default",
        "announce": "default",
        "upnp": "default",
        "channel": "default",
        "client_mode": f"file {tmp_path / 'config.toml'}",
        "relay": "default",
        "relay_bandwidth": "default",
        "log_level": "environment EQUIPOISE_LOG_LEVEL",
        "upload": f"file {tmp_path / 'config.toml'}",
        "download": "default",
        "device": "default",
        "metrics": "default",
        "swarm": "default",
        "invite": "default",
    }


def test_home_from_the_environment_or_the_platform(tmp_path: Path) -> None:
    assert load({}, {"EQUIPOISE_HOME": str(tmp_path)}).config.home == str(tmp_path)
    assert load({"home": None}, {"EQUIPOISE_HOME": ""}).config.home == str(find_home(None, {})[0])


def test_a_relay_must_be_one_that_others_can_dial(tmp_path: Path) -> None:
    environ = {"EQUIPOISE_RELAY": "yes", "EQUIPOISE_RELAY_BANDWIDTH": "1e6"}
    config = load({"home": tmp_path}, environ).config
    assert (config.relay, config.relay_bandwidth) == (True, 1e6)

    with pytest.raises(ConfigError, match="client mode cannot relay"):
        load({"home": tmp_path, "client_mode": True}, environ)
    for rate in ("0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match="EQUIPOISE_RELAY_BANDWIDTH"):
            load({"home": tmp_path}, {"EQUIPOISE_RELAY_BANDWIDTH": rate})


def test_lists_in_the_environment(tmp_path: Path) -> None:
    loaded = load({"home": tmp_path}, {"EQUIPOISE_JOIN": f"{EXAMPLE}, {EXAMPLE.replace('31337', '31338')}"})

    assert loaded.config.join == (EXAMPLE, EXAMPLE.replace("31337", "31338"))


def test_a_malformed_address_is_refused_where_someone_is_looking(tmp_path: Path) -> None:
    for flags in ({"join": ("nonsense",)}, {"listen": (LISTEN_EXAMPLE, "nonsense")}):
        with pytest.raises(ConfigError, match=r"flag --(join|listen): malformed address 'nonsense'"):
            load({"home": tmp_path, **flags}, {})
    with pytest.raises(ConfigError, match="argument join: malformed"):
        load({"home": tmp_path, "join": ["nonsense"]}, {}, style="argument ")


def test_a_malformed_address_elsewhere_is_set_aside(tmp_path: Path) -> None:
    loaded = load(with_file(tmp_path, f'join = ["nonsense", "{EXAMPLE}"]'), {})

    assert loaded.config.join == (EXAMPLE,)
    (malformed,) = loaded.malformed
    assert malformed.address == "nonsense"
    assert "config.toml: malformed address" in malformed.reason


def test_an_unknown_argument_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'jion'; did you mean join\?"):
        load({"home": tmp_path, "jion": ()}, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("jion = []", "unknown key 'jion'; did you mean join?"),
        ("home = '/tmp'", "unknown key 'home'"),
        ("zzz = 1", "unknown key 'zzz'; known are name, join"),
        (
            "join = '/ip4/1.2.3.4'",
            "join: expected a list of at most 64 addresses, such as [\"ADDRESS\"], got '/ip4/1.2.3.4'",
        ),
        ("join = [1]", 'join: expected a list of at most 64 addresses, such as ["ADDRESS"], got [1]'),
        ("name = ''", "name: expected 1 to 64 printable characters, got ''"),
        ('name = "a\\nb"', "printable"),
        ("client_mode = 'yes'", "client_mode: expected true or false, got 'yes'"),
        (
            "log_level = 'warn'",
            "log_level: expected debug or info or warning or error, got 'warn'; did you mean warning?",
        ),
        ("log_level = 'plain'", "got 'plain'"),
        (
            "log_level = 'loud'",
            "log_level: expected debug or info or warning or error, got 'loud'; known are debug,",
        ),
        ("channel = 'rot13'", "channel: expected aead or tls, got 'rot13'"),
        ("channel = 'plain'", "channel: expected aead or tls, got 'plain'"),
        (
            "upload = -1",
            'upload: expected a rate such as "10MB/s" or "80Mbit/s" (up to 10TB/s), or a number',
        ),
        ("upload = true", "bytes per second, got true"),
        ("download = 1e14", "(up to 10TB/s)"),
        ("upload = '10Mb/s'", "got '10Mb/s'; write B for bytes or bit for bits"),
        ("download = '10 miles'", "got '10 miles'"),
        ("relay_bandwidth = inf", "relay_bandwidth: expected a rate"),
        (
            "device = 'cuda:x'",
            "device: expected cpu, cuda or cuda:N, got 'cuda:x'; leave it out to reduce on the CPU",
        ),
        ("device = 0", "device: expected cpu, cuda or cuda:N, got 0"),
        ("name = ", "not valid TOML"),
        ("name = " + "[" * 30_000, "not valid TOML: nested too deep; correct it or remove it"),
        ("#" * MAX_FILE_BYTES + "#", "larger than"),
    ],
)
def test_mistakes_in_the_file_name_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(with_file(tmp_path, text), {})

    assert said in str(caught.value)
    assert str(tmp_path / "config.toml") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 5


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("10MB/s", 10e6),
        ("12.5 MB", 12.5e6),
        ("1 MiB/s", 2.0**20),
        ("80Mbit/s", 10e6),
        ("20Mbit", 2.5e6),
        ("80 Mbps", 10e6),
        ("10MBps", 10e6),
        ("640 kbit", 80e3),
        ("500 bytes/s", 500.0),
        ("5e6", 5e6),
    ],
)
def test_a_rate_is_written_as_people_say_it(tmp_path: Path, written: str, meant: float) -> None:
    assert load({"home": tmp_path, "upload": written}, {}).config.upload == meant
    assert load({"home": tmp_path}, {"EQUIPOISE_UPLOAD": written}).config.upload == meant
    assert load(with_file(tmp_path, f"upload = '{written}'"), {}).config.upload == meant


def test_blanks_around_a_pasted_address_are_stripped(tmp_path: Path) -> None:
    loaded = load({"home": tmp_path, "join": (f" {EXAMPLE}\n",), "listen": (f"\t{LISTEN_EXAMPLE} ",)}, {})

    assert (loaded.config.join, loaded.config.listen) == ((EXAMPLE,), (LISTEN_EXAMPLE,))
    assert not loaded.malformed


def test_a_mistake_on_the_command_line_is_wrong_usage(tmp_path: Path) -> None:
    for flags in ({"upload": "fast"}, {"join": ("x",)}, {"relay": True, "client_mode": True}):
        with pytest.raises(ConfigError) as caught:
            load({"home": tmp_path, **flags}, {})
        assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("CLIENT_MODE", "maybe"), ("UPLOAD", "fast"), ("LOG_LEVEL", "loud"), ("NAME", "x" * 65)],
)
def test_mistakes_in_the_environment_name_the_variable(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"EQUIPOISE_{name}"):
        load({"home": tmp_path}, {f"EQUIPOISE_{name}": value})


def test_a_variable_that_looks_like_ours_is_warned_of(tmp_path: Path) -> None:
    environ = {"EQUIPOISE_JION": "x", "EQUIPOISE_KERNELS": "torch", "EQUIPOISE_TEST_PEERS": "1"}

    assert load({"home": tmp_path}, environ).warnings == (
        "environment variable EQUIPOISE_JION is not known; did you mean EQUIPOISE_JOIN?",
    )


def test_a_daemon_in_the_open_swarm_of_a_home_that_was_invited_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "swarms" / "friends").mkdir(parents=True)

    assert load({"home": tmp_path}, {}).warnings == (
        "this home is in the private swarm friends, and this daemon in the open one: friends needs --swarm friends",
    )
    assert load({"home": tmp_path, "swarm": "friends"}, {}).warnings == ()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()

    with pytest.raises(ConfigError, match="cannot read"):
        load({"home": tmp_path}, {})


def test_a_pipe_in_place_of_the_file_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")

    with pytest.raises(ConfigError, match=r"config\.toml: it is not a regular file; make it a readable file"):
        load({"home": tmp_path}, {})


@pytest.mark.parametrize("tags", [("a b",), ("",), ("x" * 25,), ("g\npu",), tuple("abcdefghi"), "gpu", (7,)])
def test_tags_are_few_short_words(tmp_path: Path, tags: Any) -> None:
    expected = "expected a list of at most 8 words of 1 to 24 letters, digits, dots, dashes or underscores"
    with pytest.raises(ConfigError, match=f"flag --tag: {expected}"):
        load({"home": tmp_path, "tags": tags}, {})


def test_tags_are_the_words_of_specs() -> None:
    assert (MAX_TAGS, MAX_TAG_CHARACTERS) == (MAX_WORDS, MAX_WORD_CHARS)


def test_addresses_to_announce_and_the_router(tmp_path: Path) -> None:
    named = "/dns4/gpu.example.org/tcp/31337"
    loaded = load({"home": tmp_path}, {"EQUIPOISE_ANNOUNCE": named, "EQUIPOISE_UPNP": "no"})
    assert (loaded.config.announce, loaded.config.upnp) == ((named,), False)
    assert load({"home": tmp_path}, {}).config.upnp is None
    with pytest.raises(ConfigError, match=r"flag --announce: malformed address.*for example /dns4/"):
        load({"home": tmp_path, "announce": ["gpu.example.org"]}, {})
