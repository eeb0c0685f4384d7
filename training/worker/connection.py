"""A worker's requests to its host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from tierkit.access import TICKET_HEADER
from tierkit.copies.serving import KEY_HEADER
from tierkit.documents import faults
from tierkit.errors import (
    InvalidAnswer,
    MalformedMessage,
    NotFound,
    Unauthenticated,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tierkit.http.client import ask, authorization, calling, read_at_most
from tierkit.http.errors import error_of
from training.data.manifest import SegmentManifest
from training.messages import (
    LEASE_HEADER,
    UPDATE_HEADER,
    DataAnswer,
    DataReport,
    GrantedLease,
    Join,
    Progress,
    RunSpec,
    RunStatus,
    Times,
    UpdateAnswer,
    UpdateHead,
)
from training.own_data import OwnData
from training.payloads import compress, decompress, pack, packed_bytes, worth_compressing
from training.units import Flat

__all__ = ["HostConnection"]

_WHO = "the host"
_BUDGET_S = 30.0
_TRANSFER_S = 600.0
"""Seconds for weights and updates, which may be large and the link slow. A machine that has gone is noticed long
before.
"""
_SMALL_BYTES = 4 << 20
_NEW_TICKET_S = 2.0
"""Seconds before another ticket is tried."""
_REASON = 300
"""Characters of what is wrong with an answer."""
_REASON_BYTES = 4096
"""Most bytes of an error that comes instead of a chunk."""
_JSON = {"Content-Type": "application/json"}

M = TypeVar("M", bound=BaseModel)


class HostConnection:
    """Asks the host of a run. Every request may be sent twice.

    Args:
        token: gives what is shown to the host; None where it asks for none.
    """

    _bytes_per_s: float | None = None
    """Speed of the link during the last update."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        http: aiohttp.ClientSession,
        token: Callable[[], str] | None = None,
        *,
        url: str = "",
    ) -> None:
        self.url = url
        """URL of the host; it may move."""
        self.ticket: str | None = None
        """Ticket to show to the host instead of the token; see `training.worker.finding.HostAddress`."""
        self._http, self._token = http, token
        self.name, self.incarnation = name, incarnation
        self._largest = 0

    async def spec(self) -> RunSpec:
        """Description of the run."""
        spec = await self._described("spec", RunSpec)
        self._largest = packed_bytes(spec.values, spec.buffers, "fp32")
        return spec

    async def status(self) -> RunStatus:
        """Current state of the run."""
        return await self._described("status", RunStatus)

    async def _described(self, what: str, kind: type[M]) -> M:
        try:
            _, said = await self._ask("GET", "/v1/run")
        except UpstreamUnavailable as exc:
            connected = not isinstance(exc.__cause__, aiohttp.ClientConnectorError)
            if connected and self.url.startswith("http://"):
                raise UpstreamUnavailable(f"{exc} (a host with TLS has a URL that begins with https://)") from exc
            raise
        except NotFound as exc:
            raise NotFound(
                f"no host of a run is at {self.url} ({exc}): if a scheduler is, ask it for one with --scheduler "
                f"{self.url} instead of the URL"
            ) from exc
        try:
            return kind.model_validate(from_json(said)[what])
        except (ValueError, KeyError, TypeError) as exc:  # pydantic's errors are ValueErrors
            why = faults(exc, kind) if isinstance(exc, ValidationError) else str(exc)
            raise InvalidAnswer(f"{_WHO} at {self.url} describes no run that is known here: {why[:_REASON]}") from exc

    async def join(self, data_sha256: str, *, fetches: bool = False) -> None:
        """Introduce this worker.

        Raises:
            Conflict: its images are not the run's.
            NotFound: the host gives no images away.
        """
        join = Join(name=self.name, incarnation=self.incarnation, data_sha256=data_sha256, fetches=fetches)
        await self._ask("POST", "/v1/workers", join.model_dump_json().encode(), _JSON)

    async def base(self, own: OwnData) -> bytes:
        """File of the network that a run on kept pictures starts from, as the host sends it."""
        _, content = await self._ask("GET", "/v1/base", budget_s=_TRANSFER_S, most_bytes=own.size_bytes + _REASON_BYTES)
        return content

    async def manifest(self) -> SegmentManifest:
        """Manifest of the run's training images. Raises NotFound if the host gives none away."""
        _, said = await self._ask("GET", "/v1/segments")
        return _parsed(SegmentManifest, said, "describes its training images in no way known here")

    async def data(self, report: DataReport) -> DataAnswer:
        """Tell how far this worker is with its training images; what it is to do about them."""
        _, said = await self._ask("POST", "/v1/data", report.model_dump_json().encode(), _JSON)
        return _parsed(DataAnswer, said, "says nothing about the training images")

    async def chunk(self, source: str | None, sha256: str, span: range, key: str, *, budget_s: float) -> bytes:
        """A piece of a segment, from the worker at `source` with this key, or from the host."""
        headers = {"Range": f"bytes={span.start}-{span.stop - 1}"}
        path, most = f"/v1/segments/{sha256}", max(len(span) + 1, _REASON_BYTES)
        if source is None:
            path += "?" + urlencode({"worker": self.name, "incarnation": self.incarnation})
        else:
            headers[KEY_HEADER] = key
        answer, body = await self._ask("GET", path, b"", headers, peer=source, budget_s=budget_s, most_bytes=most)
        if answer.status != 206 or len(body) != len(span):
            raise InvalidAnswer(f"{source or _WHO} has sent {len(body):,} bytes of a segment, asked for {len(span):,}")
        return body

    async def leave(self, *, budget_s: float) -> None:
        """Give back what this worker has."""
        query = urlencode({"incarnation": self.incarnation})
        await self._ask("DELETE", f"/v1/workers/{quote(self.name)}?{query}", budget_s=budget_s)

    async def lease(self) -> tuple[GrantedLease, bytes] | Literal["none yet"] | None:
        """A unit and the weights to start from; None where the run has ended."""
        query = urlencode({"worker": self.name, "incarnation": self.incarnation})
        wanted = {"Accept-Encoding": "zstd"} if worth_compressing(self._bytes_per_s) else {}
        answer, body = await self._ask(
            "POST", f"/v1/leases?{query}", b"", wanted, budget_s=_TRANSFER_S, most_bytes=self._largest + _SMALL_BYTES
        )
        if answer.status == 202:
            return None if self._ended(body) else "none yet"
        granted = _parsed(GrantedLease, answer.headers.get(LEASE_HEADER, ""), "has granted something that is no lease")
        if answer.headers.get("Content-Encoding") == "zstd":
            try:
                body = decompress(body, most_bytes=self._largest)
            except MalformedMessage as exc:
                raise InvalidAnswer(f"{_WHO} has granted a lease with other weights: {exc}") from exc
        return granted, body

    def _ended(self, said: bytes) -> bool:
        try:
            return bool(from_json(said)["finished"])
        except (ValueError, KeyError, TypeError) as exc:
            raise InvalidAnswer(f"{_WHO} grants nothing, and does not say whether the run has ended") from exc

    async def renew(self, lease: int, progress: Progress) -> None:
        """Show progress; raises NotFound if the lease has expired."""
        await self._ask("PUT", f"/v1/leases/{lease}", progress.model_dump_json().encode(), _JSON)

    async def show(self, lease: GrantedLease, shown: int) -> bool:
        """Report the steps before `shown` as computed. False if the lease has expired; a host that is away hears of
        them with the update."""
        try:
            await self.renew(lease.number, Progress(worker=self.name, incarnation=self.incarnation, shown=shown))
        except NotFound:
            return False
        except (Unavailable, UpstreamTimeout, UpstreamError):
            pass
        return True

    def head(self, lease: GrantedLease, loss: float | None, times: Times | None = None) -> UpdateHead:
        """The head of the update of a lease."""
        return UpdateHead(
            worker=self.name,
            incarnation=self.incarnation,
            lease=lease.number,
            first=lease.first,
            stop=lease.first + lease.push,
            loss=loss,
            times=times or {},
        )

    def packed(self, values: Flat, buffers: Flat, spec: RunSpec) -> tuple[bytes, dict[str, str]]:
        """Pack an update for sending, compressed if the link is slow, and return it with the headers that describe its
        form.
        """
        body = pack(values, buffers, spec.wire, sparse=True)
        if worth_compressing(self._bytes_per_s):
            return compress(body), {"Content-Encoding": "zstd"}
        return body, {}

    async def update(self, head: UpdateHead, message: tuple[bytes, Mapping[str, str]]) -> UpdateAnswer:
        """Bring an update; what became of it."""
        body, headers = message
        began = time.perf_counter()
        _, said = await self._ask(
            "POST", "/v1/updates", body, {**headers, UPDATE_HEADER: head.model_dump_json()}, budget_s=_TRANSFER_S
        )
        spent_s = time.perf_counter() - began
        answer = _parsed(UpdateAnswer, said, "says nothing of an update")
        # A busy host is no slow link: compression would make it busier still.
        self._bytes_per_s = len(body) / max(1e-6, spent_s - answer.host_s)
        return answer

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        peer: str | None = None,
        budget_s: float = _BUDGET_S,
        most_bytes: int = _SMALL_BYTES,
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        # Token and ticket are the host's business alone, and a host that a scheduler has named gets no token.
        shown: Mapping[str, str] = {}
        if peer is None and self.ticket is None:
            shown = authorization(None if self._token is None else self._token())
        elif peer is None and self.ticket:
            shown = {TICKET_HEADER: self.ticket}
        who = _WHO if peer is None else f"the worker at {peer}"
        pieces: Sequence[bytes] = (body,) if body else ()
        sent: dict[str, Any] = {**(headers or {}), **shown}
        async with (
            calling(who, budget_s=budget_s),
            ask(self._http, method, f"{self.url if peer is None else peer}{path}", pieces, sent) as answer,
        ):
            said = await read_at_most(answer, most_bytes)
        if answer.status == 401 and peer is None and self.ticket is not None:
            if self.ticket:
                raise Unavailable(f"{who} does not take the scheduler's ticket", retry_after_s=_NEW_TICKET_S)
            raise Unauthenticated(
                f"{who} asks for a token, and the scheduler gives no ticket for it: instead of --scheduler, give the "
                "URL of the host, and the --token-file of a token that it knows"
            )
        if not 200 <= answer.status < 300:
            raise error_of(who, answer.status, said, answer.headers.get("Retry-After"))
        return answer, said


def _parsed(kind: type[M], said: str | bytes, wrong: str) -> M:
    try:
        return kind.model_validate_json(said)
    except ValidationError as exc:
        raise InvalidAnswer(f"{_WHO} {wrong}: {faults(exc, kind)[:_REASON]}") from exc
