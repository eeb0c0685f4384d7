"""Options of an MQTT sink: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from scheduler.sinks import mqtt_options
from scheduler.sinks.mqtt_options import MqttOptions
from tierkit.errors import MissingExtra

HOST = "broker.example"


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, "host"),
        ({"host": ""}, "host"),
        ({"host": "mqtt://broker.example"}, "host"),
        ({"host": "user:secret@broker.example"}, "host"),
        ({"host": "broker.example:1883"}, "host"),
        ({"host": "a" * 64}, "host"),
        ({"host": "x.\nexample"}, "host"),
        ({"host": HOST, "port": 0}, "port"),
        ({"host": HOST, "port": 65536}, "port"),
        ({"host": HOST, "password": "secret"}, "password"),
        ({"host": HOST, "password_file": "/secret"}, "password_file needs a username"),
        ({"host": HOST, "username": "hall", "password_file": "secret"}, "password_file must be an absolute path"),
        ({"host": HOST, "tls_ca": "/ca.pem"}, "tls_ca needs tls = true"),
        ({"host": HOST, "tls": True, "tls_ca": "ca.pem"}, "tls_ca must be an absolute path"),
        ({"host": HOST, "client_id": "a/b"}, "client_id"),
        *(
            ({"host": HOST, name: prefix}, name)
            for name in ("prefix", "discovery_prefix")
            for prefix in ("a/+", "#", "$SYS", "/a", "a/", "a//b", "a b", "a\0", "a" * 201)
        ),
        ({"host": HOST, "prefix": ""}, "prefix"),
        ({"host": HOST, "prefix": "homeassistant"}, "prefix and discovery_prefix must differ"),
        ({"host": HOST, "username": "hall", "password_file": "/a\0b"}, "control characters"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong) as caught:
        MqttOptions.model_validate(options)
    assert len(caught.value.errors()) <= 2


@pytest.mark.parametrize("host", [HOST, "localhost", "192.168.1.4", "fd00::7", "broker.example."])
def test_names_and_addresses_are_hosts(host: str) -> None:
    assert MqttOptions(host=host).host == host


@pytest.mark.parametrize(("options", "port"), [({}, 1883), ({"tls": True}, 8883), ({"tls": True, "port": 1883}, 1883)])
def test_the_port_follows_tls(options: dict[str, Any], port: int) -> None:
    given = MqttOptions(host=HOST, **options)
    stored = MqttOptions.model_validate(given.model_dump(mode="json", exclude_defaults=True))
    assert stored == given
    assert stored.tcp_port == port


def test_discovery_can_be_off() -> None:
    assert MqttOptions(host=HOST, discovery_prefix="").discovery_prefix == ""


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_options, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="needs the extra 'mqtt'"):
        MqttOptions(host=HOST)
