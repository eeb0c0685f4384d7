"""The page on the API at `/docs`: Swagger UI, from files of this package, so that it works offline."""

from __future__ import annotations

import asyncio
import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, HTMLResponse

from scheduler.api.routing import CHECKS, NOSNIFF
from tierkit.errors import NotFound

__all__ = ["docs"]

_WEB = Path(__file__).parents[1] / "web"
_SWAGGER = _WEB / "vendor" / "swagger"
_FILES = {
    "swagger-ui.css": (_SWAGGER / "swagger-ui.css", "text/css"),
    "swagger-ui-bundle.js": (_SWAGGER / "swagger-ui-bundle.js", "text/javascript"),
    "docs.js": (_WEB / "docs.js", "text/javascript"),
}

_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>Terrace API</title>
  <link rel="icon" href="data:,">
  <link rel="stylesheet" href="{files}/swagger-ui.css">
  <script defer src="{files}/swagger-ui-bundle.js"></script>
  <script defer src="{files}/docs.js"></script>
</head>
<body>
  <noscript>This page needs JavaScript. What it shows is at <a href="/openapi.json">/openapi.json</a>.</noscript>
  <div id="api"></div>
</body>
</html>
"""

_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    **NOSNIFF,
}

docs = APIRouter(include_in_schema=False, dependencies=CHECKS)


@cache
def _digest() -> str:
    """Part of the address of the files, so that browsers may keep them."""
    digest = hashlib.sha256()
    for path, _ in _FILES.values():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@docs.get("/docs")
async def page() -> HTMLResponse:
    digest = await asyncio.to_thread(_digest)
    return HTMLResponse(_PAGE.format(files=f"/docs/{digest}"), headers=_HEADERS)


@docs.get("/docs/{digest}/{name}")
async def file(digest: str, name: str) -> Response:
    """What another version of the page asks for is given as it is now, and not kept."""
    if name not in _FILES:
        raise NotFound(f"no such file: {name[:200]}")
    path, kind = _FILES[name]
    current = digest == await asyncio.to_thread(_digest)
    caching = "private, max-age=31536000, immutable" if current else "no-store"
    return FileResponse(path, media_type=kind, headers={"Cache-Control": caching, **NOSNIFF})
