"""Topics, states and discovery messages of an MQTT sink. Home Assistant's schema is a table of this file."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given, strategies as st

from scheduler.core.outbox import EventFilter
from scheduler.sinks.discovery import (
    Topics,
    device_message,
    encoded,
    leftovers,
    ownership,
    shows_answer,
    shows_source,
    state_message,
)

HOSTILE = [
    "",
    "%",
    "a/b",
    "a%2Fb",
    "+",
    "#",
    "$SYS",
    "a b",
    "a\0b",
    "\x1f",
    "~",
    "..",
    "a" * 300,
    "a" * 301,
    "\ud800",
    "ä",
]

_NAME = re.compile(r"[^\x00-\x1f#+]{1,2000}")


class Field(NamedTuple):
    """A key that Home Assistant knows."""

    kind: type | tuple[type, ...]
    required: bool = False
    allowed: tuple[object, ...] | None = None


TOPIC, TEXT = Field(str), Field(str)

AVAILABILITY = {
    "topic": Field(str, required=True),
    "payload_available": TEXT,
    "payload_not_available": TEXT,
    "value_template": TEXT,
}
DEVICE = {
    "identifiers": Field(list, required=True),  # or `connections`
    "connections": Field(list),
    "manufacturer": TEXT,
    "model": TEXT,
    "model_id": TEXT,
    "name": TEXT,
    "hw_version": TEXT,
    "serial_number": TEXT,
    "sw_version": TEXT,
    "via_device": TEXT,
    "suggested_area": TEXT,
    "configuration_url": TEXT,
}
ORIGIN = {"name": Field(str, required=True), "sw_version": TEXT, "support_url": TEXT}
SHARED = {
    "availability": Field(list),
    "availability_mode": Field(str, allowed=("all", "any", "latest")),
    "availability_topic": TOPIC,
    "availability_template": TEXT,
    "payload_available": TEXT,
    "payload_not_available": TEXT,
    "state_topic": TOPIC,
    "command_topic": TOPIC,
    "encoding": TEXT,
    "qos": Field(int, allowed=(0, 1, 2)),
}
WHOLE = {
    **SHARED,
    "device": Field(dict, required=True),
    "origin": Field(dict, required=True),
    "components": Field(dict, required=True),
}
ENTITY = {
    **SHARED,
    "platform": Field(str, required=True),
    "unique_id": Field(str, required=True),
    "name": Field((str, type(None))),
    "enabled_by_default": Field(bool),
    "entity_category": Field(str, allowed=("config", "diagnostic")),
    "icon": TEXT,
    "json_attributes_topic": TOPIC,
    "json_attributes_template": TEXT,
    "object_id": TEXT,
    "group": Field(list),
}
READING = {"value_template": TEXT, "expire_after": Field(int), "force_update": Field(bool)}
PLATFORMS = {
    "sensor": {
        **ENTITY,
        **READING,
        "device_class": TEXT,
        "last_reset_value_template": TEXT,
        "options": Field(list),
        "state_class": Field(str, allowed=("measurement", "total", "total_increasing", "measurement_angle")),
        "suggested_display_precision": Field(int),
        "unit_of_measurement": TEXT,
    },
    "binary_sensor": {
        **ENTITY,
        **READING,
        "device_class": Field(str, allowed=("connectivity",)),
        "off_delay": Field(int),
        "payload_off": TEXT,
        "payload_on": TEXT,
    },
    "image": {
        **ENTITY,
        "content_type": TEXT,
        "image_encoding": Field(str, allowed=("b64",)),
        "image_topic": TOPIC,
        "url_topic": TOPIC,
        "url_template": TEXT,
    },
}
"""The keys that Home Assistant allows and requires, in our words. Source: schemas.py, config.py, sensor.py,
binary_sensor.py and image.py in homeassistant/components/mqtt of https://github.com/home-assistant/core (2025)."""

DISCOVERY_TOPIC = re.compile(r"homeassistant/device/(?P<object_id>[a-zA-Z0-9_-]+)/config")
"""From discovery.py of the same folder."""


def misfits(message: dict[str, Any], schema: dict[str, Field], where: str = "") -> list[str]:
    """What Home Assistant would refuse."""
    wrong = [f"{where}{key} is missing" for key, field in schema.items() if field.required and key not in message]
    for key, value in message.items():
        field = schema.get(key)
        if field is None:
            wrong.append(f"{where}{key} is unknown")
        elif not isinstance(value, field.kind) or (field.allowed is not None and value not in field.allowed):
            wrong.append(f"{where}{key} is {value!r}")
        elif key.endswith("_topic") and not _NAME.fullmatch(str(value)):
            wrong.append(f"{where}{key} is not a topic: {value!r}")
    return wrong


def refused(message: dict[str, Any]) -> list[str]:
    """What Home Assistant would refuse in a discovery message of a device."""
    wrong = misfits(message, WHOLE)
    for name, schema in (("device", DEVICE), ("origin", ORIGIN)):
        wrong += misfits(message.get(name, {}), schema, f"{name}.")
    for each in message.get("availability", []):
        wrong += misfits(each, AVAILABILITY, "availability.")
    for name, component in message.get("components", {}).items():
        if component.keys() == {"platform"}:  # is removed
            continue
        wrong += misfits(component, PLATFORMS[component["platform"]], f"{name}.")
        if component["platform"] != "image" and "state_topic" not in component | message:
            wrong.append(f"{name}.state_topic is missing")
        if component["platform"] == "image" and ("image_topic" in component) == ("url_topic" in component):
            wrong.append(f"{name} needs either image_topic or url_topic")
    return wrong


def source(**changes: Any) -> dict[str, Any]:
    """The fields of a `SourceNow`."""
    coarse = {"label": "fish", "confidence": 0.5}
    fine = {"label": "shark", "confidence": 0.9, "coarse_label": "fish"}
    last = {
        "label": "shark",
        "confidence": 0.9,
        "answered_by": "cloud",
        "coarse": coarse,
        "fine": fine,
        "taken_at": "2026-11-29T10:00:00Z",
        "sequence": 7,
        "revision": 1,
    }
    return {
        "node": "pi",
        "source": "gate",
        "state": "running",
        "health": "alive",
        "site": None,
        "last": last,
        **changes,
    }


@pytest.mark.parametrize("picture_type", [None, "image/jpeg"])
@pytest.mark.parametrize("site", [None, "farm"])
@pytest.mark.parametrize("name", ["gate", *HOSTILE])
def test_home_assistant_accepts_the_device_of_a_source(name: str, site: str | None, picture_type: str | None) -> None:
    name = name.encode("utf-8", "replace").decode()  # JSON has no lone surrogates
    content = device_message(
        source(source=name, site=site), Topics("terrace"), version="1.0", picture_type=picture_type
    )
    message = json.loads(content)
    assert refused(message) == []
    shown = {name for name, component in message["components"].items() if component.keys() != {"platform"}}
    assert shown == {"label", "confidence", "connection"} | ({"picture"} if picture_type else set())
    ids = [component["unique_id"] for component in message["components"].values() if "unique_id" in component]
    assert len(ids) == len(set(ids))
    topic = Topics.discovery("homeassistant", Topics("terrace").state("pi", name))
    found = DISCOVERY_TOPIC.fullmatch(topic)
    assert found is not None
    assert message["device"]["identifiers"] == [found["object_id"]]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"devices": {}}, "devices is unknown"),
        ({"qos": 3}, "qos is 3"),
        ({"state_topic": "terrace/+/state"}, "state_topic is not a topic: 'terrace/+/state'"),
        ({"components": {"a": {"platform": "sensor", "name": "A"}}}, "a.unique_id is missing"),
        ({"components": {"a": {"platform": "image", "unique_id": "a"}}}, "a needs either image_topic or url_topic"),
    ],
)
def test_the_table_refuses_what_home_assistant_refuses(change: dict[str, Any], wrong: str) -> None:
    message = json.loads(device_message(source(), Topics("terrace"), version="1.0"))
    assert refused({**message, **change}) == [wrong]


def test_two_names_never_share_a_topic() -> None:
    levels = [encoded(name) for name in HOSTILE]
    assert len(set(levels)) == len(HOSTILE)
    for level in levels:
        assert 0 < len(level) <= 255
        assert re.fullmatch(r"[A-Za-z0-9_.%~-]+", level)
    assert encoded("gate-1.b_c") == "gate-1.b_c"


@given(st.text(), st.text())
def test_encoding_is_one_to_one(one: str, two: str) -> None:
    assert (encoded(one) == encoded(two)) == (one == two)


def test_prefixes_keep_devices_apart() -> None:
    states = [Topics(prefix).state(node, "gate") for prefix in ("terrace", "other") for node in ("pi", "pi2")]
    assert len({Topics.discovery("homeassistant", state) for state in states}) == 4


def test_the_topics_of_a_source() -> None:
    topics = Topics("terrace")
    state = topics.state("pi", "a/+")
    assert state == "terrace/source/pi/a%2F%2B/state"
    assert Topics.picture(state) == "terrace/source/pi/a%2F%2B/picture"
    assert topics.event("source/pi/gate") == "terrace/events/source/pi/gate"
    assert topics.event("release") == "terrace/events/release"


def test_the_state_of_a_source_is_its_newest_answer() -> None:
    assert json.loads(state_message(source())) == {
        "node": "pi",
        "source": "gate",
        "state": "online",
        "label": "shark",
        "coarse_label": "fish",
        "confidence": 0.9,
        "tier": "cloud",
        "taken_at": "2026-11-29T10:00:00Z",
        "sequence": 7,
        "revision": 1,
    }


def test_a_local_answer_is_the_coarse_label_too() -> None:
    last = {**source()["last"], "fine": None, "label": "fish", "confidence": 0.5, "answered_by": "end"}
    state = json.loads(state_message(source(last=last)))
    assert (state["label"], state["coarse_label"], state["tier"]) == ("fish", "fish", "end")


def test_an_answer_that_the_filter_does_not_admit_is_not_shown() -> None:
    state = json.loads(state_message(source(), shows_answer=False))
    assert [state[name] for name in ("label", "coarse_label", "confidence", "tier")] == [None] * 4
    assert state["sequence"] == 7


@pytest.mark.parametrize(
    ("health", "state", "shown"),
    [
        ("alive", "running", "online"),
        ("alive", "", "unknown"),
        ("alive", "starting", "unknown"),
        ("dead", "", "offline"),
        ("suspect", "running", "online"),
        ("draining", "running", "online"),
        ("alive", "paused", "offline"),
        ("alive", "waiting", "offline"),
        ("alive", "finished", "offline"),
        ("dead", "running", "offline"),
        ("removed", "running", "offline"),
        (None, "running", "offline"),
    ],
)
def test_a_source_is_online_if_its_node_is_heard_and_it_runs(health: str | None, state: str, shown: str) -> None:
    message = json.loads(state_message(source(health=health, state=state, last=None)))
    assert message["state"] == shown
    assert message["label"] is message["sequence"] is None


@pytest.mark.parametrize(
    ("conditions", "shown"),
    [
        (EventFilter(), True),
        (EventFilter(events=("job.*",)), False),
        (EventFilter(events=("source.online",)), True),
        (EventFilter(events=("job.*", "observation.*")), True),
        (EventFilter(sources=("gate",)), True),
        (EventFilter(sources=("pi/g*",)), True),
        (EventFilter(sources=("door",)), False),
        (EventFilter(events=("job.*",), sources=("gate",)), False),
        (EventFilter(labels=("dog",), confidence=0.99), True),
    ],
)
def test_the_filter_chooses_the_sources(conditions: EventFilter, shown: bool) -> None:
    assert shows_source(conditions, "pi", "gate") is shown


@pytest.mark.parametrize(
    ("conditions", "shown"),
    [
        (EventFilter(), True),
        (EventFilter(events=("job.*",), sources=("door",)), True),
        (EventFilter(labels=("shark",)), True),
        (EventFilter(labels=("fish",)), True),
        (EventFilter(labels=("dog",)), False),
        (EventFilter(confidence=0.9), True),
        (EventFilter(confidence=0.91), False),
    ],
)
def test_the_filter_chooses_the_answers(conditions: EventFilter, shown: bool) -> None:
    assert shows_answer(conditions, source()["last"]) is shown


def test_no_answer_meets_no_condition() -> None:
    assert not shows_answer(EventFilter(labels=("dog",)), None)
    assert shows_answer(EventFilter(), None)


STATE = Topics("terrace").state("pi", "gate")
PICTURE, DEVICE_TOPIC = Topics.picture(STATE), Topics.discovery("homeassistant", STATE)


def owned(client_id: str = "me", prefix: str = "homeassistant", *, picture: bool = True) -> list[tuple[str, str]]:
    return ownership(client_id, discovery_prefix=prefix, has_picture=picture)


@pytest.mark.parametrize(
    ("kept", "now", "is_source", "cleared"),
    [
        (owned(), owned(), True, []),
        (owned(), owned(), False, [STATE, PICTURE, DEVICE_TOPIC]),
        (owned(picture=False), owned(), False, [STATE, DEVICE_TOPIC]),
        (owned(prefix=""), owned(), False, [STATE, PICTURE]),
        (owned(), owned(picture=False), True, [PICTURE]),
        (owned(), owned(prefix=""), True, [DEVICE_TOPIC]),
        (owned(), owned(prefix="other"), True, [DEVICE_TOPIC]),
        (owned("other"), owned(), False, []),
        ([], owned(), False, []),
    ],
)
def test_only_own_leftovers_are_cleared(
    kept: list[tuple[str, str]], now: list[tuple[str, str]], is_source: bool, cleared: list[str]
) -> None:
    assert leftovers(STATE, kept, now=now, is_source=is_source) == cleared
