"""Structured logs: text for people, one JSON object a line for machines, both on standard error.

Code logs with the standard library, variable parts in `extra`: `log.info("registered", extra={"lease_s": 2.0})`.
The request id of the request being served is added by itself, and in JSON the id of its trace.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal, TextIO

from tierkit.plaintext import harmless, one_line
from tierkit.wire.trace import Trace

__all__ = ["configure", "current_request_id", "current_trace", "request_context"]

_request_id: ContextVar[str] = ContextVar("request_id", default="")
_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)

_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""Attributes of every log record; any other attribute was passed in `extra`."""

_QUIET = ("uvicorn", "httpx", "httpcore", "asyncio", "multipart", "aiosqlite", "sqlalchemy", "alembic")
"""Libraries that tell each request or query at INFO or DEBUG: only their warnings are of use here."""


def current_request_id() -> str:
    """Id of the request being served in this context; "" outside one."""
    return _request_id.get()


def current_trace() -> Trace | None:
    """The trace of the request being served in this context; None outside one."""
    return _trace.get()


class request_context:
    """Context manager: every record logged inside carries `request_id`, and the id of `trace`."""

    def __init__(self, request_id: str, trace: Trace | None = None) -> None:
        self._id = request_id
        self._trace = trace

    def __enter__(self) -> None:
        self._tokens = _request_id.set(self._id), _trace.set(self._trace)

    def __exit__(self, *_error: object) -> None:
        request_id, trace = self._tokens
        _request_id.reset(request_id)
        _trace.reset(trace)


def configure(level: str, style: Literal["text", "json"], *, node_id: str = "", stream: TextIO | None = None) -> None:
    """Send all logs of this process to `stream` (default: standard error), instead of the earlier configuration.

    Args:
        level: "debug", "info", "warning" or "error".
        style: "text" or "json".
        node_id: name of the node or service, part of every line; "" for none.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter(node_id) if style == "json" else _TextFormatter(node_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    # It warns of each malformed form, and anybody may send those.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    # Its exporter warns of each try to reach a collector that is away, and gives an error when it gives up.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    logging.captureWarnings(True)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    # Libraries that add to each record call it by names with an underscore.
    return {name: value for name, value in record.__dict__.items() if name not in _OWN_FIELDS and name[0] != "_"}


class _TextFormatter(logging.Formatter):
    """`12:30:01.250Z INFO    end-3fa9 registered lease_s=2.0 [request id]`."""

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = f" {node_id}" if node_id else ""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.gmtime(record.created))
        parts = [f"{clock}.{int(record.msecs):03d}Z {record.levelname:<7}{self._node_id} {record.getMessage()}"]
        parts += [f"{name}={value}" for name, value in _extras(record).items()]
        if request_id := current_request_id():
            parts.append(f"[{request_id}]")
        # One record, one line: a line break in a value from outside must not look like a record of its own.
        line = one_line(" ".join(parts))
        if record.exc_info:
            line += "\n" + harmless(self.formatException(record.exc_info))
        return line


class _JsonFormatter(logging.Formatter):
    """One JSON object: time (RFC 3339, UTC), level, logger, message, node_id, request_id, trace_id, and the extras."""

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._node_id:
            entry["node_id"] = self._node_id
        if request_id := current_request_id():
            entry["request_id"] = request_id
        if trace := current_trace():
            entry["trace_id"] = trace.trace_id
        entry |= _extras(record)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
