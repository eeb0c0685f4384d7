"""The generated parts of the reference: commands, settings and REST, from the code that they describe.

    python -m tests.reference            write them
    python -m tests.reference --check    name the pages that differ

A part stands between `<!-- generated: NAME -->` and `<!-- end of generated -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from pydantic import BaseModel

from cloud_node.settings import CloudSettings
from edge_node.settings import EdgeSettings
from end_node.settings import EndSettings, LearnSettings, SourceSettings, SpoolSettings, UplinkSettings
from scheduler.api.app import create_app
from scheduler.settings import SchedulerSettings
from terrace import cli
from tierkit.settings import FurtherScheduler, NodeSettings, ServiceSettings, UpperSettings, description

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
SECTIONS: dict[str, type[ServiceSettings]] = {
    "All services": ServiceSettings,
    "All nodes": NodeSettings,
    "Edge and cloud nodes": UpperSettings,
    "End node": EndSettings,
    "Edge node": EdgeSettings,
    "Cloud node": CloudSettings,
    "Scheduler": SchedulerSettings,
}
TABLES: dict[str, type[BaseModel]] = {
    "Table source": SourceSettings,
    "Table uplink": UplinkSettings,
    "Table spool": SpoolSettings,
    "Table learn": LearnSettings,
    "Table also": FurtherScheduler,
}
_SERVICES = ("scheduler", "end", "edge", "cloud")
_COMMON = {"--help", "--json", "--scheduler", "--token-file", "--tls-ca"}
"""Described at the head of the page."""
_WIDTH = 100
_PART = re.compile(r"(<!-- generated: (\w[\w -]*) -->\n).*?(<!-- end of generated -->)", re.DOTALL)


def cell(text: object) -> str:
    return " ".join(str(text).replace("|", r"\|").split())


def table(header: str, rows: list[str]) -> str:
    return "\n".join([header, "|---" * (header.count("|") - 1) + "|", *rows]) if rows else ""


# --- settings


def own_fields(kind: type[BaseModel]) -> list[str]:
    """Fields that the class adds, or whose default it changes."""
    base = kind.__bases__[0]
    inherited = base.model_fields if issubclass(base, ServiceSettings) else {}
    return [
        name
        for name, field in kind.model_fields.items()
        if name not in inherited or inherited[name].default != field.default
    ]


def _default(value: object) -> str:
    match value:
        case None | "" | () | BaseModel():
            return ""
        case tuple():
            return f"`{','.join(value)}`"
        case float():
            return f"`{value:g}`"
    return f"`{value}`"


def settings(title: str) -> str:
    kind: type[BaseModel] = {**SECTIONS, **TABLES}[title]
    rows = []
    for name in own_fields(kind):
        field = kind.model_fields[name]
        text = description(kind, name) if issubclass(kind, ServiceSettings) else field.description or ""
        rows.append(f"| `{name}` | {'' if field.is_required() else _default(field.default)} | {cell(text)} |")
    return table("| setting | default | meaning |", rows)


# --- commands


def commands() -> str:
    return "\n\n".join(_command(name, cli._load(name)) for name in cli._COMMANDS if name not in _SERVICES)


def _command(path: str, command: Any) -> str:
    inner = getattr(command, "commands", {})
    parts = [] if inner and " " not in path else [f"### `terrace {path}`"]
    if inner and " " not in path:
        parts.append(f"## `terrace {path}`")
    elif " " not in path:
        parts[0] = f"## `terrace {path}`"
    parts.append(cell(command.help or ""))
    rows = [_option(each) for each in command.params if not each.hidden and _COMMON.isdisjoint(each.opts)]
    parts.append(table("| argument or option | meaning |", rows))
    parts += [_command(f"{path} {name}", each) for name, each in inner.items() if not each.hidden]
    return "\n\n".join(part for part in parts if part)


def _option(parameter: Any) -> str:
    named = parameter.opts[0].startswith("-")
    words = [*parameter.opts, *parameter.secondary_opts] if named else [(parameter.metavar or parameter.name).upper()]
    shown = ", ".join(f"`{word}`" for word in words)
    if named and not getattr(parameter, "is_flag", False) and parameter.metavar:
        shown = f"{shown} `{parameter.metavar}`"
    text = cell(parameter.help or "")
    if parameter.envvar:
        text += f" (`{parameter.envvar}`)"
    default = parameter.default
    if named and not callable(default) and default not in (None, False, (), []) and "Default" not in text:
        text += f" Default: `{getattr(default, 'value', default)}`."
    return f"| {shown} | {text} |"


# --- REST


@cache
def openapi() -> dict[str, Any]:
    """The description of a scheduler that asks for tokens."""
    lifecycle = SimpleNamespace(authenticator=object(), on_refusal=None)
    made: dict[str, Any] = create_app(SchedulerSettings(), lifecycle).openapi()  # type: ignore[arg-type]
    return made


def operations() -> str:
    found: dict[str, list[str]] = {}
    for path, item in openapi()["paths"].items():
        for method, operation in item.items():
            found.setdefault(operation.get("tags", ["service"])[0], []).append(_operation(method, path, operation))
    return "\n\n".join(f"## {tag.capitalize()}\n\n" + "\n\n".join(each) for tag, each in found.items())


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [f"### `{method.upper()} {path}`", f"{operation['summary'].rstrip('.')}."]
    if words := operation.get("description"):
        parts += [cell(each) for each in words.split("\n\n")]
    rows = [
        f"| `{each['name']}` | {_place(each)}, {_type(_given(each['schema']))} | {cell(each['description'])} | "
        f"`{_plain(each['schema']['examples'][0])}` |"
        for each in operation.get("parameters", ())
    ]
    parts.append(table("| parameter | type | meaning | example |", rows))
    body = operation.get("requestBody", {})
    parts += [cell(body.get("description", "")), _bodies(body.get("content", {}))]
    answers = [
        f"| {status} | {_answer(answer)} |" for status, answer in operation["responses"].items() if "$ref" not in answer
    ]
    parts.append(table("| status | answer |", answers))
    return "\n\n".join(part for part in parts if part)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _place(parameter: Mapping[str, Any]) -> str:
    needed = parameter.get("required") and parameter["in"] != "path"
    return f"{parameter['in']}{', required' if needed else ''}"


def _given(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a parameter that is given: no path, query or header holds null."""
    choices = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return choices[0] if len(choices) == 1 else schema


def _bodies(contents: Mapping[str, Any]) -> str:
    """The bodies that an operation takes: each schema with its media types."""
    found: dict[str, list[str]] = {}
    for kind, content in contents.items():
        found.setdefault(_kind(content.get("schema", {"type": "binary"})), []).append(f"`{kind}`")
    return "Body: " + "; ".join(f"{schema} ({', '.join(kinds)})" for schema, kinds in found.items()) if found else ""


def _answer(answer: Mapping[str, Any]) -> str:
    words = cell(answer["description"]).replace("Successful Response", "")
    kinds = [
        " ".join(
            [*([] if kind == "application/json" and schema else [f"`{kind}`"]), *([_kind(schema)] if schema else [])]
        )
        for kind, content in answer.get("content", {}).items()
        if (schema := content.get("schema", {})) != {"$ref": "#/components/schemas/Error"}
    ]
    shown = ", ".join(kind for kind in kinds if kind)
    return f"{words} ({shown})" if words and shown else words or shown or "No body."


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, with a link if it has a name."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return r" \| ".join(dict.fromkeys(_kind(each) for each in schema[word]))
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"array of {_kind(schema.get('items', {}))}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {_kind(schema['additionalProperties'])}"
        case str(name):
            return str(schema.get("format", name))
    return "any"


def _type(schema: Mapping[str, Any], *, default: bool = True) -> str:
    """A schema with its bounds and its default."""
    inner = schema.get("anyOf", [schema])[0]
    parts = [_kind(schema)]
    low, above, high = (inner.get(word) for word in ("minimum", "exclusiveMinimum", "maximum"))
    bounds = [f"from {low:g}"] if low is not None else [f"above {above:g}"] if above is not None else []
    if high is not None and high < 2**31 - 1:
        bounds.append(f"up to {high:,.10g}")
    if bounds:
        parts.append(" ".join(bounds))
    if (size := inner.get("maxItems") or inner.get("maxLength")) is not None:
        parts.append(f"up to {size} {'entries' if 'maxItems' in inner else 'characters'}")
    if default and schema.get("default") not in (None, "", [], {}) and not isinstance(schema["default"], dict):
        parts.append(f"default `{json.dumps(schema['default'])}`")
    return ", ".join(parts)


def schemas() -> str:
    return "\n\n".join(_schema(name, each) for name, each in sorted(openapi()["components"]["schemas"].items()))


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required, fields = schema.get("required", ()), schema.get("properties", {})
    is_request = schema.get("additionalProperties") is False  # answers may have further fields
    rows = [
        f"| `{field}` | {_type(each, default=is_request)}{', required' if field in required else ''} | "
        f"{cell(each['description'])} |"
        for field, each in fields.items()
    ]
    parts = [f"### {name}", cell(schema["description"]), table("| field | type | meaning |", rows)]
    if fields:
        parts.append(f"```json\n{_json({field: each['examples'][0] for field, each in fields.items()})}\n```")
    if "enum" in schema:
        parts.append(f"One of {_kind(schema)}.")
    return "\n\n".join(part for part in parts if part)


def _json(example: Mapping[str, Any]) -> str:
    """An object with a field in each line; a longer value takes several."""
    lines = []
    for field, value in example.items():
        short = json.dumps({field: value}, ensure_ascii=False)[1:-1]
        long = json.dumps({field: value}, ensure_ascii=False, indent=2)[2:-2]
        lines.append(f"  {short}" if len(short) <= _WIDTH or not isinstance(value, dict | list) else long)
    return "\n".join(["{", ",\n".join(lines), "}"])


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "operations": operations,
    "schemas": schemas,
    **{f"settings {title}": lambda title=title: settings(title) for title in [*SECTIONS, *TABLES]},  # type: ignore[misc]
}


def pages() -> Iterator[tuple[Path, str, str]]:
    """Pages with generated parts: the file, what it says, and what it should say."""
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if "<!-- generated:" in text:
            yield page, text, _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


def main() -> int:
    stale = [(page, wanted) for page, text, wanted in pages() if text != wanted]
    for page, wanted in stale:
        typer.echo(page.relative_to(ROOT))
        if "--check" not in sys.argv:
            page.write_text(wanted, encoding="utf-8")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
