"""Where a setting comes from, and what is said when it is wrong."""

import re
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError

from tierkit.errors import SetupError
from tierkit.settings import NodeSettings, Port, description, load_settings
from tierkit.types import Tier


class EdgeLike(NodeSettings):
    """Settings of a made-up node."""

    service: ClassVar[str] = "edgelike"
    port: Port = 7


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "terrace.toml"
    path.write_text('[edgelike]\nport = 1\nhost = "10.0.0.1"\nmodel = ["a", "b"]\n\n[other]\nport = 99\n')
    return path


def test_each_source_beats_the_ones_below(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    assert load_settings(EdgeLike, flags={}).port == 7
    assert load_settings(EdgeLike, flags={}, config=config).port == 1
    monkeypatch.setenv("TERRACE_EDGELIKE_PORT", "2")
    assert load_settings(EdgeLike, flags={}, config=config).port == 2
    assert load_settings(EdgeLike, flags={"port": "3"}, config=config).port == 3
    assert load_settings(EdgeLike, flags={"port": None}, config=config).host == "10.0.0.1"


def test_construction_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERRACE_EDGELIKE_PORT", "2")
    monkeypatch.setenv("PORT", "3")
    assert EdgeLike().port == 7


def test_names_are_a_list_in_the_file_and_comma_separated_elsewhere(
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    assert load_settings(EdgeLike, flags={}, config=config).model == ("a", "b")
    monkeypatch.setenv("TERRACE_EDGELIKE_MODEL", "c, d")
    assert load_settings(EdgeLike, flags={}, config=config).model == ("c", "d")
    assert load_settings(EdgeLike, flags={"model": "e"}, config=config).model == ("e",)


@pytest.mark.parametrize(
    ("flags", "environment", "table", "sentence"),
    [
        ({"port": "http"}, {}, "", "the flag --port is 'http': input should be a valid integer"),
        ({"drain_s": "-1"}, {}, "", "the flag --drain-s is '-1': input should be greater than or equal to 0"),
        ({"header_timeout_s": "inf"}, {}, "", "the flag --header-timeout-s is 'inf': input should be a finite number"),
        ({"max_queue_delay_ms": "1e9"}, {}, "", "--max-queue-delay-ms is '1e9': input should be less than or equal to"),
        ({"scheduler": "ftp://x"}, {}, "", "the flag --scheduler is 'ftp://x': must start with http:// or https://"),
        ({}, {"PORT": "70000"}, "", "the environment variable TERRACE_EDGELIKE_PORT is '70000'"),
        ({}, {"PROT": "1"}, "", "TERRACE_EDGELIKE_PROT is unknown; did you mean port?"),
        ({}, {}, "prot = 1", "the key prot is unknown; did you mean port?"),
        ({}, {}, 'log_level = "loud"', "table [edgelike], the key log_level is 'loud': input should be 'debug'"),
    ],
)
def test_an_error_names_the_setting_and_its_source(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: dict[str, str],
    environment: dict[str, str],
    table: str,
    sentence: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"TERRACE_EDGELIKE_{name}", value)
    config = tmp_path / "terrace.toml"
    config.write_text(f"[edgelike]\n{table}\n")
    with pytest.raises(SetupError) as caught:
        load_settings(EdgeLike, flags=flags, config=config)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_that_must_be_given_is_named_as_its_flag() -> None:
    class Needy(NodeSettings):
        """Settings of a made-up node."""

        service: ClassVar[str] = "edgelike"
        port: Port = 7
        what_for: str

    with pytest.raises(SetupError, match="the flag --what-for is missing"):
        load_settings(Needy, flags={})


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("ftp://x", "must start with http:// or https://"),
        ("http://127.0.0.1:99999", "a port from 1 to 65535"),
        ("http://127.0.0.1:0", "a port from 1 to 65535"),
        ("http://127.0.0.1:http", "a port from 1 to 65535"),
        ("http://", "must name a host"),
        ("http://:8070", "must name a host"),
        ("http://[::1", "must name a host"),
        ("http://a b", "must name a host"),
        ("http://a?b=c", "must end before ? or #"),
    ],
)
def test_a_url_that_nobody_can_be_reached_at(url: str, sentence: str) -> None:
    with pytest.raises(SetupError, match=r"the flag --scheduler is .*" + re.escape(sentence)):
        load_settings(NodeSettings, flags={"scheduler": url})


@pytest.mark.parametrize("url", ["http://edge-1:8070/", "https://terrace.example/base", "http://[::1]:8070"])
def test_a_url_that_is_one(url: str) -> None:
    assert load_settings(NodeSettings, flags={"scheduler": url}).scheduler == (url.rstrip("/"),)


@pytest.mark.parametrize("node_id", ["Edge-1", "-edge", "edge 1", "a" * 64, "edge-1\n"])
def test_a_wrong_node_id_is_told_the_rule_in_words(node_id: str) -> None:
    with pytest.raises(SetupError, match=r"the flag --node-id .*must be 1 to 63 lower-case letters, digits, dots"):
        load_settings(NodeSettings, flags={"node_id": node_id})


@pytest.mark.parametrize("tier", list(Tier))
def test_no_node_is_called_like_a_tier(tier: Tier) -> None:
    with pytest.raises(SetupError, match=rf"the flag --node-id .*must not be the name of a tier.* such as {tier}-1"):
        load_settings(NodeSettings, flags={"node_id": str(tier)})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read the settings file"),
        ("port = ", "is not valid TOML"),
        ("port = " + "[" * 10_000, "is not valid TOML"),
        ("port = " + "9" * 10_000, "is not valid TOML"),
        ("edgelike = 3", "has no table [edgelike]; it holds none"),
        ("[other]\nport = 1", "has no table [edgelike]; it holds [other]"),
    ],
)
def test_a_file_that_cannot_serve_is_named(tmp_path: Path, content: str | None, sentence: str) -> None:
    config = tmp_path / "terrace.toml"
    if content is not None:
        config.write_text(content)
    with pytest.raises(SetupError) as caught:
        load_settings(EdgeLike, flags={}, config=config)
    assert sentence in str(caught.value)
    assert str(config) in str(caught.value)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EdgeLike().port = 3


def test_a_node_without_a_name_gets_one_of_its_tier() -> None:
    first, second = EdgeLike(port=0).node_id, EdgeLike(port=0).node_id
    assert first.startswith("edgelike-")
    assert first != second
    assert EdgeLike().node_id == EdgeLike().node_id != first
    assert EdgeLike(node_id="edge-7").node_id == "edge-7"


def test_a_subclass_that_changes_a_default_inherits_the_documentation() -> None:
    assert description(EdgeLike, "port") == description(NodeSettings, "port") != ""


@pytest.mark.parametrize("password", ["geheim", "ge@heim", "ge/heim"])
def test_a_password_in_an_address_is_refused_and_not_repeated(password: str) -> None:
    with pytest.raises(SetupError, match=r"no password|must name a host") as caught:
        load_settings(EdgeLike, flags={"scheduler": f"http://u:{password}@127.0.0.1:8070"})
    assert "heim" not in str(caught.value)
