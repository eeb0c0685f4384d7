"""The contract between Terrace and a kind of sink: the entry points of the group `terrace.sinks`.

An entry point names an object that is a `SinkKind`. Terrace opens one `Delivery` for each sink of that kind, and calls
`deliver` with one event after the other. Events of different keys come at the same time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel, ValidationError

from scheduler.core.outbox import NO_FILTER, EventFilter, SinkEvent
from scheduler.sinks.addresses import Resolve, resolve
from tierkit.documents import faults
from tierkit.errors import InvalidInput

__all__ = ["Delivery", "SinkContext", "SinkEvent", "SinkKind", "SourceView", "options_of", "payload", "read_secret"]

_MOST_SECRET_BYTES = 4096

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """Terrace's part in a sink: settings, and what a sink may ask."""

    name: str
    """The sink's."""
    allow_private: bool = False
    """True if an admin allows receivers in private networks and on the scheduler's own machine."""
    tls_ca: Path | None = None
    """File with the certificates to trust. Default: the public authorities count."""
    resolve: Resolve = resolve
    """Finds the addresses of a name."""
    id: str = ""
    """Stable and unique: a later sink of the same name has another one."""
    filter: EventFilter = NO_FILTER
    """The events that the sink gets."""
    testing: bool = False
    """True if the sink is opened for a test, maybe next to its real connection."""
    sources: Callable[[], SourceView] | None = None
    """Returns the sources of the fleet."""
    picture: Callable[[str, str, int], Awaitable[tuple[bytes, str]]] | None = None
    """Returns the picture of an observation (node, source and sequence number) and its media type. Raises NotFound."""


class SourceView(Protocol):
    """The sources as the scheduler knows them."""

    @property
    def version(self) -> Any:
        """Another value when something has changed."""
        ...

    async def changed(self, version: Any) -> None:
        """Wait for something newer than a version. A change of the health of a node does not end the wait."""
        ...

    def marks(self) -> Mapping[tuple[str, str], Hashable]:
        """All sources, by node id and name. Each has another value when it has changed."""
        ...

    def now(self, node_id: str, source: str) -> dict[str, Any]:
        """A source as it is now, with the fields of `GET /v1/sources`."""
        ...


class Delivery(Protocol):
    """An open connection to one receiver."""

    async def deliver(self, event: SinkEvent) -> None:
        """Send an event; returns when the receiver has it. It may be called again with the same event.

        Raises:
            Rejected: the receiver refuses this event for good; it becomes a dead letter.
            ReceiverGone: the receiver wants no more events; the sink pauses.
            ConnectionEnded: the connection must be opened again before another try.
            TerraceError, OSError, TimeoutError: another try may work.
        """
        ...


class SinkKind(Protocol):
    """A kind of sink."""

    @property
    def Options(self) -> type[BaseModel]:
        """The options of a sink. They are checked when it is added, and shown to admins: a secret is the path of a file
        on the scheduler's machine."""
        ...

    def open(self, options: Any, context: SinkContext) -> AbstractAsyncContextManager[Delivery]:
        """Connect to a receiver. A test opens a second connection of the same sink.

        Args:
            options: an instance of `Options`.

        Raises:
            TerraceError, OSError, TimeoutError: on entering, if the receiver cannot be reached now.
        """
        ...


def payload(event: SinkEvent) -> bytes:
    """An event as JSON, as every kind of sink sends it."""
    at = datetime.fromtimestamp(round(event.at, 3), UTC)
    return _encode({"id": event.id, "type": event.type, "timestamp": at, "data": event.data})


def options_of(kind: SinkKind, given: Mapping[str, Any]) -> BaseModel:
    """Options of a sink, checked. Raises InvalidInput."""
    options = kind.Options
    try:
        return options.model_validate(dict(given))
    except ValidationError as exc:
        raise InvalidInput(f"options: {faults(exc, options)}") from exc


def read_secret(path: Path) -> str:
    """The content of a file with a secret, without white space at its ends. The error never shows it.

    Raises:
        InvalidInput: the file cannot be read, is empty, longer than 4 KiB, or not text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_SECRET_BYTES + 1)
        text = content.decode().strip()
    except OSError as exc:
        raise InvalidInput(f"the file {path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError:
        raise InvalidInput(f"the file {path} is not UTF-8 text") from None
    if not text or len(content) > _MOST_SECRET_BYTES:
        raise InvalidInput(f"the file {path} must hold a secret of at most {_MOST_SECRET_BYTES} bytes")
    return text
