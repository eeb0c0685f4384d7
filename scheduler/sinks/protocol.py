"""The contract between Terrace and a kind of sink: the entry points of the group `terrace.sinks`.

An entry point names an object that is a `SinkKind`. Terrace opens one `Delivery` for each sink of that kind, and calls
`deliver` with one event after the other. Events of different keys come at the same time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel, Secret, SecretBytes, SecretStr, ValidationError

from scheduler.core.outbox import NO_FILTER, EventFilter, SinkEvent
from scheduler.sinks.addresses import Resolve
from scheduler.sinks.threads import Threads
from tierkit.access import read_private
from tierkit.documents import faults
from tierkit.errors import BrokenExtension, InvalidInput, SetupError, TerraceError

__all__ = [
    "Delivery",
    "SinkContext",
    "SinkEvent",
    "SinkKind",
    "SourceView",
    "options_of",
    "payload",
    "plain_path",
    "read_secret",
    "stored_options",
]

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
    resolve: Resolve = field(default_factory=lambda: Threads().resolve)
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
    """Options of a sink, checked.

    Raises:
        InvalidInput: they are wrong.
        BrokenExtension: the kind fails while it checks them.
    """
    try:
        options = kind.Options
        try:
            return options.model_validate(dict(given))
        except ValidationError as exc:
            raise InvalidInput(f"options: {faults(exc, options)}") from exc
    except (TerraceError, KeyboardInterrupt):
        raise
    except BaseException as exc:  # code of others may raise anything
        raise BrokenExtension(f"the options cannot be checked: {type(exc).__name__}: {exc}") from exc


def stored_options(kind: SinkKind, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a sink as they are stored: checked, without defaults, in plain JSON.

    Raises:
        InvalidInput: they are wrong.
        BrokenExtension: the kind fails while it checks them, or its options cannot be read again once stored.
    """
    options = options_of(kind, given)
    try:
        if secret := _secret_in(options.model_dump(round_trip=True)):
            raise BrokenExtension(
                f"the option {secret} is a secret, and options are stored and shown to admins: take the path of a "
                "file with the secret instead"
            )
        stored = _dumped(options)
        if _dumped(options_of(kind, stored)) != stored:
            raise BrokenExtension("the options are different ones after they have been stored as JSON")
    except InvalidInput as exc:
        raise BrokenExtension(f"the options cannot be read again once they are stored: {exc}") from exc
    except (TerraceError, KeyboardInterrupt):
        raise
    except BaseException as exc:  # code of others may raise anything
        raise BrokenExtension(f"the options cannot be stored as JSON: {type(exc).__name__}: {exc}") from exc
    return stored


def _dumped(options: BaseModel) -> dict[str, Any]:
    return options.model_dump(mode="json", by_alias=True, exclude_defaults=True, round_trip=True)


def _secret_in(value: Any, name: str = "") -> str:
    """The name of an option that pydantic hides; "" if there is none."""
    if isinstance(value, Secret | SecretBytes | SecretStr):
        return name
    if isinstance(value, Mapping):
        found = [_secret_in(each, name or str(key)) for key, each in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        found = [_secret_in(each, name) for each in value]
    else:
        found = []
    return next(filter(None, found), "")


def plain_path(path: Path) -> Path:
    """A path in options of a sink. Raises ValueError if it has control characters."""
    if not str(path).isprintable():
        raise ValueError("must have no control characters")
    return path


def read_secret(path: Path) -> str:
    """The content of a file with a secret, without white space at its ends. The error never shows it.

    Raises:
        InvalidInput: the file cannot be read, others may read it, or it is empty, longer than 4 KiB, or not text.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for its other end
            raise InvalidInput(f"the secret file {path} is not a file")
        content = read_private(path, "the secret file", most_bytes=_MOST_SECRET_BYTES)
        text = content.decode().strip()
    except SetupError as exc:
        raise InvalidInput(str(exc)) from exc
    except UnicodeDecodeError:
        raise InvalidInput(f"the secret file {path} is not UTF-8 text") from None
    except ValueError as exc:  # such as a null byte in the path
        raise InvalidInput(f"the secret file cannot be read: {exc}") from exc
    if not text:
        raise InvalidInput(f"the secret file {path} is empty")
    return text
