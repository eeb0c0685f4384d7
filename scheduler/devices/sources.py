"""Sources of nodes, listed and changed through the scheduler."""

from __future__ import annotations

import aiohttp
from pydantic import ValidationError

from scheduler.core.fleet import Ledger
from tierkit.errors import NotFound, NotTerrace, UpstreamError, UpstreamUnavailable
from tierkit.http.client import ask, authorization, calling, read_at_most
from tierkit.http.errors import error_of
from tierkit.wire.sources import SourcesReport

__all__ = ["RemoteSources"]

_BUDGET_S = 5.0
_MOST_ANSWER_BYTES = 256 * 1024


class RemoteSources:
    """Passes requests on to the nodes that have the sources; each node decides what it allows.

    Args:
        devices: the device list.
        http: client to ask with.
    """

    def __init__(self, devices: Ledger, http: aiohttp.ClientSession) -> None:
        self._devices = devices
        self._http = http

    async def report(self, node_id: str) -> SourcesReport:
        """The sources of a node and what becomes of their pictures. Raises the errors of `change`."""
        said = await self.change(node_id, "GET", "")
        try:
            return SourcesReport.model_validate_json(said)
        except ValidationError as exc:
            raise NotTerrace(f"{node_id} lists its sources in a form that is not known here") from exc

    async def change(self, node_id: str, method: str, path: str, body: bytes = b"") -> bytes:
        """Send a request to a node, within 5 s; returns the body of its answer.

        Args:
            path: below /v1/sources.

        Raises:
            NotFound: no such node, it has no sources, or the node says so.
            UpstreamError, UpstreamTimeout: it cannot be asked, or answers nonsense.
            TerraceError: its refusal.
        """
        device = self._devices.get(node_id)
        if not device.registration.sources:
            raise NotFound(f"node {node_id!r} has no sources")
        if device.death is not None:
            raise UpstreamError(f"{node_id} cannot be asked: {device.death}")
        headers = {"Content-Type": "application/json", **authorization(device.registration.key)}
        url = f"{device.registration.url}/v1/sources{path}"
        try:
            async with (
                calling(node_id, budget_s=_BUDGET_S),
                ask(self._http, method, url, (body,) if body else (), headers) as answer,
            ):
                said = await read_at_most(answer, _MOST_ANSWER_BYTES)
        except UpstreamUnavailable as exc:  # it would say that the scheduler is not available
            raise UpstreamError(str(exc)) from exc
        if 200 <= answer.status < 300:
            return said
        if answer.status == 401:  # not the fault of the token that the scheduler was shown
            raise UpstreamError(f"{node_id} does not accept the scheduler's key", status_code=401)
        raise error_of(node_id, answer.status, said, answer.headers.get("Retry-After"))
