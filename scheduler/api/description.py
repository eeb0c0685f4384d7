"""Additions to `/openapi.json`: how tokens are sent, and every refusal."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from scheduler.api.examples import add_examples
from tierkit.access import SESSION_COOKIE, needs_no_token

__all__ = ["describe", "texts_of_fields"]

_JSON = "application/json"
_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "description": "The body of every refusal.",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "Sentence with the cause and the remedy."}},
}
_SECURITY = {
    "token": {"type": "http", "scheme": "bearer", "description": "Made by `terrace token create`."},
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": SESSION_COOKIE,
        "description": "Of a browser, from `POST /v1/session`.",
    },
}
_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
_REFUSALS: dict[str, dict[str, Any]] = {
    "400": {"description": "A wrong path, parameter, header or body; the sentence names it."},
    "401": {
        "description": "No valid token, where one is asked for.",
        "headers": {"WWW-Authenticate": {"description": "A bearer token is wanted.", "schema": {"type": "string"}}},
    },
    "403": {"description": "The token has another role or is for other nodes, or a page of another origin has asked."},
    "408": {"description": "The body did not arrive in time."},
    "413": {"description": "More bytes than the limit."},
    "422": {"description": "The JSON is not what is expected; the sentence names the field."},
    "421": {"description": "This scheduler is a standby: ask the one that leads.", "headers": _RETRY},
    "429": {"description": "The token's limit of requests, uploads or unfinished jobs.", "headers": _RETRY},
    "503": {"description": "Not now.", "headers": _RETRY},
}
"""Refusals below the routes: by the authenticator and by the readers of bodies. A route lists its own."""
_OF_ALL, _OF_THE_GATE, _OF_BODIES, _OF_JSON = ("400", "403", "421", "503"), ("401", "429"), ("408", "413"), ("422",)


def texts_of_fields(kind: type) -> dict[str, str]:
    """The docstrings of a class's own fields, by the names of the fields."""
    (written,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(written, ast.ClassDef)
    texts = {}
    for field, text in pairwise(written.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                texts[name] = inspect.cleandoc(words)
    return texts


def describe(app: FastAPI) -> None:
    """Let `app.openapi()` tell all. Call once, when the routes are there."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, summary=app.summary, version=app.version, routes=app.routes)
            app.openapi_schema = _completed(made, closed=app.state.authenticator is not None)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the framework's own way to change it


def _completed(made: dict[str, Any], *, closed: bool) -> dict[str, Any]:
    """
    Args:
        closed: True if this service asks for tokens.
    """
    components = made["components"]
    schemas: dict[str, Any] = components["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _tidy(made["paths"], schemas)
    _tidy(dict(schemas), schemas)
    for _, operation in _operations(made):
        operation["responses"] = _named(operation["responses"], schemas)
    schemas["Error"] = deepcopy(_ERROR)
    _write_null(schemas)
    components["responses"] = {status: _as_error(refusal) for status, refusal in _REFUSALS.items()}
    components["securitySchemes"] = _SECURITY
    made["security"] = [{"token": []}, {"session": []}, *([] if closed else [{}])]
    for path, operation in _operations(made):
        is_open = needs_no_token(path)
        if is_open:
            operation["security"] = []
        body = operation.get("requestBody", {}).get("content", {})
        refused = {
            *_OF_ALL,
            *(() if is_open and not body else _OF_THE_GATE),
            *(_OF_BODIES if body else ()),
            *(_OF_JSON if _JSON in body else ()),
        }
        answers = operation["responses"]
        answers.pop("422", None)  # the framework's, for whatever has a parameter
        for status, answer in answers.items():
            if int(status) >= 400:
                answers[status] = _as_error({**_REFUSALS.get(status, {}), **answer})
        for status in refused - answers.keys():
            answers[status] = {"$ref": f"#/components/responses/{status}"}
        operation["responses"] = dict(sorted(answers.items()))
    add_examples(made)
    return made


def _operations(made: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((path, operation) for path, item in made["paths"].items() for operation in item.values())


def _as_error(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}Error"}}}}


def _named(found: Any, schemas: dict[str, Any]) -> Any:
    """The same, with a reference instead of each object with a title, which goes to the schemas of the document."""
    if isinstance(found, list):
        return [_named(inner, schemas) for inner in found]
    if not isinstance(found, dict):
        return found
    named = {key: _named(inner, schemas) for key, inner in found.items()}
    if "properties" in named and (name := named.get("title")):
        schemas.setdefault(name, named)
        return {"$ref": f"{_SCHEMAS}{name}"}
    return named


def _write_null(found: Any) -> None:
    """Descriptions of classes name Python's None; readers of JSON know it as null."""
    for inner in found.values() if isinstance(found, dict) else found:
        if isinstance(inner, dict | list):
            _write_null(inner)
        if isinstance(inner, dict) and isinstance(words := inner.get("description"), str):
            inner["description"] = re.sub(r"\bNone\b", "null", re.sub(r"(^|[.] )None\b", r"\1Null", words))


def _tidy(found: Any, schemas: dict[str, Any]) -> None:
    """Move the definitions inside the schemas of routes to the definitions of the whole document.

    Tuples of one kind become arrays, because not every tool knows `prefixItems`. Patterns end with `$`, because JSON
    Schema does not know Python's `\\Z`.
    """
    if isinstance(found, dict):
        for name, schema in found.pop("$defs", {}).items():
            _tidy(schema, schemas)
            schemas.setdefault(name, schema)
        if str(found.get("$ref")).startswith("#/$defs/"):
            found["$ref"] = found["$ref"].replace("#/$defs/", _SCHEMAS)
        if isinstance(pattern := found.get("pattern"), str):
            found["pattern"] = re.sub(r"\\Z$", "$", pattern)
        kinds = found.get("prefixItems", [])
        if kinds and all(kind == kinds[0] for kind in kinds):
            found["items"] = found.pop("prefixItems")[0]
        for inner in found.values():
            _tidy(inner, schemas)
    elif isinstance(found, list):
        for inner in found:
            _tidy(inner, schemas)
