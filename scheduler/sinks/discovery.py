"""Topics and retained messages of an MQTT sink: the state of each source, and its device in Home Assistant. Pure.

Home Assistant reads one discovery message per device since 2024.12.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from scheduler.core.outbox import EventFilter, SinkEvent, is_online, matches
from tierkit.types import Health

__all__ = [
    "MOST_PREFIX",
    "Topics",
    "device_message",
    "encoded",
    "leftovers",
    "ownership",
    "shows_answer",
    "shows_source",
    "state_message",
]

MOST_PREFIX = 200
"""Characters of a prefix of topics. With the longest names a topic stays below 1 kB; MQTT allows 64 kB."""
_MOST_NAME = 255
"""Characters of an encoded name. A longer one is cut, and ends with its digest."""
_DIGEST = 32
_EMPTY = "%"
"""Placeholder for the empty string: other names have two digits after each percent sign."""

_OWNER, _DISCOVERY, _PICTURE = "sink", "discovery", "picture"
"""User properties of a state: the client id of the sink that published it, and what else it has published with it."""
_OF_SOURCES = ("source.online", "source.offline", "observation.added", "observation.amended")
_NO_ANSWER: Mapping[str, Any] = {}


def encoded(name: str) -> str:
    """A name as one level of a topic. Two names never give the same level, and no level has a wildcard or a slash."""
    level = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
    if len(level) > _MOST_NAME:
        digest = hashlib.sha256(level.encode()).hexdigest()[:_DIGEST]
        return f"{level[: _MOST_NAME - _DIGEST - 1]}~{digest}"
    return level or _EMPTY


class Topics(Struct, frozen=True):
    """The topics below a prefix."""

    prefix: str

    @property
    def status(self) -> str:
        """Retained: `online`, or `offline` while the scheduler does not publish."""
        return f"{self.prefix}/status"

    @property
    def states(self) -> str:
        """A filter that matches the states of all sources."""
        return f"{self.prefix}/source/+/+/state"

    def event(self, key: str) -> str:
        """Topic of the events of one key (source/NODE/NAME, job/ID). Their order is kept."""
        return "/".join([self.prefix, "events", *(encoded(part) for part in key.split("/"))])

    def state(self, node: str, source: str) -> str:
        """Retained: the state of a source."""
        return f"{self.prefix}/source/{encoded(node)}/{encoded(source)}/state"

    @staticmethod
    def picture(state: str) -> str:
        """Retained: the newest picture of the source with this topic of its state."""
        return f"{state.removesuffix('/state')}/picture"

    @staticmethod
    def device(state: str) -> str:
        """Id of the source's device in Home Assistant."""
        return f"terrace_{hashlib.sha256(state.encode()).hexdigest()[:_DIGEST]}"

    @classmethod
    def discovery(cls, discovery_prefix: str, state: str) -> str:
        """Retained: the device of a source."""
        return f"{discovery_prefix}/device/{cls.device(state)}/config"


def state_message(source: Mapping[str, Any], *, shows_answer: bool = True) -> bytes:
    """The state of a source as JSON.

    Args:
        source: the fields of a `SourceNow`.
        shows_answer: False if the filter of the sink does not admit the newest answer; then its fields are null.
    """
    last = source["last"] or _NO_ANSWER
    answer = last if shows_answer else _NO_ANSWER
    fine, coarse = answer.get("fine") or _NO_ANSWER, answer.get("coarse") or _NO_ANSWER
    return msgspec.json.encode(
        {
            "node": source["node"],
            "source": source["source"],
            "state": _connection(source),
            "label": answer.get("label"),
            "coarse_label": fine.get("coarse_label") or coarse.get("label"),
            "confidence": answer.get("confidence"),
            "tier": answer.get("answered_by"),
            "taken_at": last.get("taken_at"),
            "sequence": last.get("sequence"),
            "revision": last.get("revision"),
        }
    )


def _connection(source: Mapping[str, Any]) -> str:
    """online, offline, or unknown while the source starts or its node has not reported it yet."""
    health = None if source["health"] is None else Health(source["health"])
    online = is_online(source["state"], health)
    if online is None or (source["state"] == "" and health is not None and not health.gone):
        return "unknown"
    return "online" if online else "offline"


def shows_source(conditions: EventFilter, node: str, source: str) -> bool:
    """True if a sink with this filter publishes the state of a source."""
    wanted, data = EventFilter(events=conditions.events, sources=conditions.sources), {"node": node, "source": source}
    return any(matches(wanted, SinkEvent(type=kind, key="", data=data)) for kind in _OF_SOURCES)


def shows_answer(conditions: EventFilter, last: Mapping[str, Any] | None) -> bool:
    """True if a sink with this filter publishes the newest answer of a source.

    Args:
        last: the fields of a `SeenPicture`; None if there is none.
    """
    wanted = EventFilter(labels=conditions.labels, confidence=conditions.confidence)
    return matches(wanted, SinkEvent(type="", key="", data=last or _NO_ANSWER))


def device_message(
    source: Mapping[str, Any], topics: Topics, *, version: str, picture_type: str | None = None
) -> bytes:
    """The discovery message of a source: a device with its label, confidence and connection, and maybe its picture.

    Args:
        source: the fields of a `SourceNow`.
        version: of Terrace.
        picture_type: media type of the pictures; None: they are not published.
    """
    state = topics.state(source["node"], source["source"])
    device = topics.device(state)
    # A component with only its platform is removed.
    picture: dict[str, Any] = {"platform": "image"}
    if picture_type is not None:
        picture |= {
            "name": "Picture",
            "unique_id": f"{device}_picture",
            "image_topic": topics.picture(state),
            "content_type": picture_type,
        }
    place = {} if source["site"] is None else {"suggested_area": source["site"]}
    return msgspec.json.encode(
        {
            "device": {
                "identifiers": [device],
                "name": f"{source['source']} on {source['node']}",
                "manufacturer": "Terrace",
                "model": "source",
                **place,
            },
            "origin": {"name": "Terrace", "sw_version": version},
            "availability": [{"topic": topics.status}],
            "state_topic": state,
            "qos": 1,
            "components": {
                "label": {
                    "platform": "sensor",
                    "name": "Label",
                    "unique_id": f"{device}_label",
                    "value_template": "{{ (value_json.label | string)[:255] }}",
                    "json_attributes_topic": state,
                },
                "confidence": {
                    "platform": "sensor",
                    "name": "Confidence",
                    "unique_id": f"{device}_confidence",
                    "unit_of_measurement": "%",
                    "state_class": "measurement",
                    "suggested_display_precision": 0,
                    "value_template": "{{ none if value_json.confidence is none else 100 * value_json.confidence }}",
                },
                "connection": {
                    "platform": "binary_sensor",
                    "name": "Connection",
                    "unique_id": f"{device}_connection",
                    "device_class": "connectivity",
                    "entity_category": "diagnostic",
                    "payload_on": "online",
                    "payload_off": "offline",
                    "value_template": "{{ none if value_json.state == 'unknown' else value_json.state }}",
                },
                "picture": picture,
            },
        }
    )


def ownership(client_id: str, *, discovery_prefix: str, has_picture: bool) -> list[tuple[str, str]]:
    """The user properties of a state, by which a later connection finds what is to be removed."""
    return [(_OWNER, client_id), (_DISCOVERY, discovery_prefix), (_PICTURE, "1" if has_picture else "")]


def leftovers(
    state: str, properties: Sequence[tuple[str, str]], *, now: Sequence[tuple[str, str]], is_source: bool
) -> list[str]:
    """The retained topics to clear because of a state that the broker has kept.

    Args:
        state: its topic.
        properties: its user properties.
        now: the user properties of a state that would be published now.
        is_source: False if the source does not exist any more.
    """
    had, has = dict(properties), dict(now)
    if had.get(_OWNER) != has[_OWNER]:
        return []  # it belongs to another sink
    gone = [] if is_source else [state]
    if had.get(_PICTURE) and not (is_source and has[_PICTURE]):
        gone.append(Topics.picture(state))
    if (prefix := had.get(_DISCOVERY)) and not (is_source and prefix == has[_DISCOVERY]):
        gone.append(Topics.discovery(prefix, state))
    return gone
