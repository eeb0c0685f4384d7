"""Routes of the page: HTML shells and static files. They hold no data, so they need no token."""

from __future__ import annotations

import hashlib
import mimetypes
from functools import cache, lru_cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scheduler.api.routing import CHECKS, NOSNIFF
from tierkit.distribution import installed_version
from tierkit.errors import NotFound

__all__ = ["PAGES", "pages"]

_HERE = Path(__file__).parents[1] / "web"
_FOLDERS = (_HERE / "static", _HERE / "vendor" / "uplot", _HERE / "vendor" / "swagger")

PAGES = {
    "fleet": "Fleet",
    "live": "Live",
    "try": "Try it",
    "learn": "Learn",
    "jobs": "Jobs",
    "timeline": "Timeline",
    "releases": "Releases",
    "privacy": "Privacy",
    "training": "Training",
    "hosts": "Hosts",
    "sinks": "Sinks",
}
"""Names in the navigation by the names of their modules. The first one is what `/ui` shows."""

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
_OWN_POLICY = "; ".join((*_POLICY, "img-src 'self' blob:", "require-trusted-types-for 'script'"))
_API_POLICY = "; ".join((*_POLICY, "img-src 'self' blob: data:"))
"""Swagger UI writes markup, and has pictures in its styles."""

_HEADERS = {
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    **NOSNIFF,
}
_FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable", **NOSNIFF}

pages = APIRouter(include_in_schema=False, dependencies=CHECKS)


@cache
def _files() -> dict[str, bytes]:
    """Return the modules and styles of the pages by name. Most of them belong to Swagger UI."""
    found = (path for folder in _FOLDERS for path in sorted(folder.iterdir()) if path.suffix in (".js", ".css", ".svg"))
    return {path.name: path.read_bytes() for path in found}


@cache
def _digest() -> str:
    """Part of each file's address, so that browsers may keep them for ever."""
    digest = hashlib.sha256()
    for name, content in _files().items():
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()[:12]


@lru_cache(maxsize=256)
def _rendered(template: str, root: str, page: str = "", module: str = "") -> str:
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined)
    return environment.get_template(template).render(
        page=page,
        module=module,
        pages=PAGES,
        first=next(iter(PAGES)),
        root=root,
        files=f"{root}/ui/files/{_digest()}",
        version=installed_version(),
    )


def _root(request: Request) -> str:
    """The path below which the scheduler is served, with which each link begins; "" for none."""
    root: str = request.scope["root_path"]
    return root


def _shown(request: Request, page: str, module: str | None = None) -> HTMLResponse:
    content = _rendered("page.html", _root(request), page, module or page)
    return HTMLResponse(content, headers={"Content-Security-Policy": _OWN_POLICY, **_HEADERS})


@pages.get("/docs")
async def api_page(request: Request) -> Response:
    """Swagger UI, from files of this package, so that it works offline."""
    return HTMLResponse(
        _rendered("docs.html", _root(request)), headers={"Content-Security-Policy": _API_POLICY, **_HEADERS}
    )


@pages.get("/")
async def root(request: Request) -> Response:
    """Browsers are redirected to the page; other clients get a 404."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"{_root(request)}/ui", 307)
    raise NotFound("no such route: /; the page is at /ui, the API at /docs")


@pages.get("/ui")
async def first_page(request: Request) -> Response:
    return _shown(request, next(iter(PAGES)))


@pages.get("/ui/join")
async def join_page(request: Request) -> Response:
    """For people who are invited to a training run. The token is in the fragment of the link, which no server sees."""
    content = _rendered("join.html", _root(request))
    return HTMLResponse(content, headers={"Content-Security-Policy": _OWN_POLICY, **_HEADERS})


@pages.get("/ui/jobs/{job_id}")
async def job_page(request: Request, job_id: str) -> Response:
    """One shell for all jobs: its module reads the address."""
    return _shown(request, "jobs", module="job")


@pages.get("/ui/live/{node_id}/{source}")
async def source_page(request: Request, node_id: str, source: str) -> Response:
    """One shell for all sources."""
    return _shown(request, "live", module="source")


@pages.get("/ui/training/{run_id}")
async def run_page(request: Request, run_id: str) -> Response:
    """One shell for all training runs."""
    return _shown(request, "training", module="run")


@pages.get("/ui/files/{digest}/{name}")
async def file(digest: str, name: str) -> Response:
    """A module or style. One that another version of the page asks for is given as it is now, and not kept."""
    content = _files().get(name)
    if content is None:
        raise NotFound(f"no such file: {name[:200]}")
    headers = _FOR_EVER if digest == _digest() else {"Cache-Control": "no-store", **NOSNIFF}
    kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(content, media_type=kind, headers=headers)


@pages.get("/ui/{page}")
async def page(request: Request, page: str) -> Response:
    if page not in PAGES:
        raise NotFound(f"no such page: {page[:200]}; there are {', '.join(PAGES)}")
    return _shown(request, page)
