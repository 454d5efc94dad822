from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equipoise.averaging import manifest
from equipoise.dht.address import EXAMPLE, LISTEN_EXAMPLE
from equipoise.peer.config import MAX_BANDWIDTH, MAX_FILE_BYTES, Loaded, default_home, load
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
    flags = with_file(tmp_path, 'name = "file"\nlog_level = "error"\nbandwidth = 5\nclient_mode = true\n')
    environ = {"EQUIPOISE_NAME": "environment", "EQUIPOISE_LOG_LEVEL": "warning"}

    loaded = load({**flags, "name": "flag", "client_mode": None, "join": ()}, environ)

    config = loaded.config
    assert (config.name, config.log_level, config.bandwidth, config.client_mode) == (
        "flag",
        "warning",
        5.0,
        True,
    )
    assert origins(loaded) == {
        "home": "flag --home",
        "name": "flag --name",
        "join": "default",
        "listen": "default",
        "direct_listen": "default",
        "channel": "default",
        "client_mode": f"file {tmp_path / 'config.toml'}",
        "relay": "default",
        "relay_bandwidth": "default",
        "log_level": "environment EQUIPOISE_LOG_LEVEL",
        "bandwidth": f"file {tmp_path / 'config.toml'}",
    }


def test_home_from_the_environment_or_the_platform(tmp_path: Path) -> None:
    assert load({}, {"EQUIPOISE_HOME": str(tmp_path)}).config.home == str(tmp_path)
    assert load({"home": None}, {"EQUIPOISE_HOME": ""}).config.home == str(default_home())


def test_a_relay_must_be_one_that_others_can_dial(tmp_path: Path) -> None:
    environ = {"EQUIPOISE_RELAY": "yes", "EQUIPOISE_RELAY_BANDWIDTH": "1e6"}
    config = load({"home": tmp_path}, environ).config
    assert (config.relay, config.relay_bandwidth) == (True, 1e6)

    with pytest.raises(ConfigError, match="client mode cannot relay"):
        load({"home": tmp_path, "client_mode": True}, environ)
    for rate in ("0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match="relay_bandwidth"):
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
    with pytest.raises(ConfigError, match="unknown setting 'jion'"):
        load({"home": tmp_path, "jion": ()}, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("jion = []", "unknown key 'jion'; known are name, join"),
        ("home = '/tmp'", "unknown key 'home'"),
        ("join = '/ip4/1.2.3.4'", "join: expected `array`, got `str`"),
        ("join = [1]", "join: expected `str`, got `int`"),
        ("name = ''", "name: expected `str` of length >= 1"),
        ('name = "a\\nb"', "printable"),
        ("client_mode = 'yes'", "client_mode: expected `bool`"),
        ("log_level = 'loud'", "log_level: expected debug or info or warning or error; got 'loud'"),
        ("channel = 'rot13'", "channel: expected aead or tls; got 'rot13'"),
        ("channel = 'plain'", "encrypts nothing"),
        ("channel = 'plain'\nlisten = ['/ip4/0.0.0.0/tcp/0', '/ip4/127.0.0.1/tcp/0']", "encrypts nothing"),
        ("bandwidth = -1", "bandwidth: expected `float` >= 0"),
        ("bandwidth = 1e14", "bandwidth: expected `float` <= 10000000000000.0"),
        ("relay_bandwidth = inf", "finite"),
        ("name = ", "not valid TOML"),
        ("#" * MAX_FILE_BYTES + "#", "larger than"),
    ],
)
def test_mistakes_in_the_file_name_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(with_file(tmp_path, text), {})

    assert said in str(caught.value)
    assert str(tmp_path / "config.toml") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


def test_channels_without_encryption_stay_on_loopback(tmp_path: Path) -> None:
    flags = with_file(tmp_path, "listen = ['/ip4/127.0.0.1/tcp/0']")

    assert load(flags, {"EQUIPOISE_CHANNEL": "plain"}).config.channel == "plain"


@pytest.mark.parametrize(
    ("name", "value"),
    [("CLIENT_MODE", "maybe"), ("BANDWIDTH", "fast"), ("LOG_LEVEL", "loud"), ("NAME", "x" * 65)],
)
def test_mistakes_in_the_environment_name_the_variable(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"EQUIPOISE_{name}"):
        load({"home": tmp_path}, {f"EQUIPOISE_{name}": value})


def test_a_variable_that_looks_like_ours_is_warned_of(tmp_path: Path) -> None:
    environ = {"EQUIPOISE_JION": "x", "EQUIPOISE_KERNELS": "torch", "EQUIPOISE_TEST_SWARM": "1"}

    assert load({"home": tmp_path}, environ).warnings == (
        "environment variable EQUIPOISE_JION is not known; did you mean EQUIPOISE_JOIN?",
    )


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()

    with pytest.raises(ConfigError, match="cannot read"):
        load({"home": tmp_path}, {})


def test_a_bandwidth_is_bounded_as_joins_are() -> None:
    assert manifest.MAX_BANDWIDTH == MAX_BANDWIDTH
