"""What the messages between services have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from pydantic import TypeAdapter

from scheduler.core.policy import PolicyRequest
from tierkit.wire.events import Sent, TaskEvent
from tierkit.wire.messages import ESCALATION, UPSTREAMS, Heartbeat, Lease, Registration


def unbounded(schema: Any, place: str = "") -> Iterator[str]:
    """Places of a JSON schema where a number of any size may stand."""
    if isinstance(schema, list):
        for number, item in enumerate(schema):
            yield from unbounded(item, f"{place}.{number}")
    elif isinstance(schema, dict):
        lower, upper = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
        if schema.get("type") in ("integer", "number") and not (lower & schema.keys() and upper & schema.keys()):
            yield place
        for name, item in schema.items():
            yield from unbounded(item, f"{place}.{name}")


@pytest.mark.parametrize(
    "schema",
    [
        *(TypeAdapter(kind).json_schema() for kind in (Registration, Heartbeat, Lease, PolicyRequest)),
        UPSTREAMS.json_schema(),
        ESCALATION.json_schema(),
        msgspec.json.schema(TaskEvent),
        msgspec.json.schema(Sent),
    ],
    ids=["registration", "heartbeat", "lease", "policy", "upstreams", "escalation", "task event", "sent"],
)
def test_every_number_in_a_message_has_bounds(schema):
    assert list(unbounded(schema)) == []
