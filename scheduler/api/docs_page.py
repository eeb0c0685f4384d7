"""A page on the API, made from its OpenAPI description: no scripts, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

__all__ = ["render_docs"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin-top: 2rem; border-bottom: 1px solid #ccc; } code { background: #f3f3f3; padding: 0 .25em; }
td { vertical-align: top; padding: .1rem 1rem .1rem 0; } .method { font-weight: bold; } small { color: #666; }
"""


def render_docs(openapi: Mapping[str, Any]) -> str:
    """HTML for the whole description."""
    groups: dict[str, list[str]] = {}
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            for tag in operation.get("tags", ["other"]):
                groups.setdefault(tag, []).append(_operation(method, path, operation))
    info = openapi["info"]
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(parts)}" for tag, parts in groups.items())
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>"
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>"
        f"<p>{escape(info.get('summary', ''))}</p>"
        f'<p>Full description: <a href="/openapi.json">/openapi.json</a>. Errors are <code>{{"error": "a sentence"}}'
        f"</code>.</p>{body}</html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(parameter['name'])}</code><td><small>{escape(parameter['in'])}</small>"
        f"<td>{escape(parameter.get('description', ''))}"
        for parameter in operation.get("parameters", ())
    )
    text = escape(operation.get("description", ""))
    body = escape(operation.get("requestBody", {}).get("description", ""))
    return (
        f"<h3><span class=method>{escape(method.upper())}</span> <code>{escape(path)}</code> "
        f"<small>{escape(operation.get('summary', ''))}</small></h3>"
        + "".join(f"<p>{part}</p>" for part in (text, body) if part)
        + (f"<table>{rows}</table>" if rows else "")
    )
