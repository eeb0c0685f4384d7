"""The job API for asynchronous programs. All of the client's logic is here; `tierkit.client.blocking` only runs it."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import anyio
from anyio import to_thread
from pydantic import BaseModel, ValidationError

from tierkit.client.http import Patience, SchedulerConnection
from tierkit.client.lines import ServerSentEvent, iter_lines, iter_server_sent_events
from tierkit.client.model_sets import file_upload, read_model_set
from tierkit.client.uploads import Images, Labels, PolicyFields, UploadBody, build_upload, json_upload
from tierkit.documents import faults
from tierkit.errors import DeadlineExceeded, InvalidInput, NotFound, Unavailable, UpstreamError, UpstreamTimeout
from tierkit.types import JobState, WorkerOrder
from tierkit.wire.api import (
    AttemptPage,
    CoarseResults,
    Device,
    DeviceList,
    Event,
    Explanation,
    FailedResults,
    FallbackResults,
    FineResults,
    ImageResult,
    Job,
    JobPage,
    SiteChange,
    SiteList,
    SiteNow,
    StateChange,
    parse,
)
from tierkit.wire.learning import Improvement, ImprovementList, LearningNow, NewLabel
from tierkit.wire.offers import HostOffer, OfferOrders
from tierkit.wire.releases import (
    GuardName,
    NewRelease,
    Pruned,
    ReleaseList,
    ReleaseNow,
    Rollout,
    StartRequest,
)
from tierkit.wire.runs import (
    BegunRun,
    Invitation,
    InvitationWish,
    Run,
    RunMatch,
    RunOrders,
    RunPage,
    RunProgress,
    RunReport,
    RunStart,
    RunSummary,
    RunWorker,
    WorkerOffer,
    WorkerWish,
)
from tierkit.wire.sinks import (
    DeadLetterPage,
    NewSink,
    Replayed,
    ReplayRequest,
    SinkFilter,
    SinkList,
    SinkNow,
    SinkTested,
)
from tierkit.wire.sources import (
    ObservationPage,
    SeenGap,
    SeenPicture,
    SourceFields,
    SourceList,
    SourceNow,
    SourceRights,
    SourcesReport,
)

__all__ = ["AsyncClient", "ObservationFilters"]

# The scheduler sends a comment every 15 s; after two that did not come the connection is dead.
_STREAM_SILENCE_S = 35.0

_OBSERVATIONS = "/v1/observations"
_GAP = b'{"gap"'
"""The beginning of a line about lost observations."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_RESULT_EVENTS: dict[str, type[CoarseResults | FineResults | FallbackResults | FailedResults]] = {
    "coarse": CoarseResults,
    "fine": FineResults,
    "fallback": FallbackResults,
    "failed": FailedResults,
}


class ObservationFilters(TypedDict, total=False):
    """Conditions that an observation must meet, all of them; None sets no condition."""

    source: str | None
    """Name of the source."""
    node: str | None
    """Id of its node."""
    site: str | None
    """Site of its node."""
    label: str | None
    """Class that is the answer in force, or a superclass for all of its classes."""
    since: datetime | None
    """Taken then or later. Without a time zone it is local time."""
    below: float | None
    """The confidence is less than this, 0 to 1."""
    amended: bool | None
    """True: the observation was amended."""


class PictureFilters(TypedDict, total=False):
    """Conditions that a picture must meet; None sets no condition."""

    source: str | None
    node: str | None
    site: str | None
    least: float | None
    """With `answered`: the confidence that the answer from above has at least, 0 to 1."""


class AsyncClient(SchedulerConnection):
    """A connection to one scheduler, or to several of which one leads.

        async with AsyncClient("http://127.0.0.1:8070") as terrace:
            job = await terrace.submit("photos/", scheme="mapping")
            async for event in terrace.events(job):
                match event:
                    case CoarseResults(results=results) | FineResults(results=results):
                        for result in results:
                            print(result.name, result.label)

    Every failure is one of `tierkit.errors`. `InvalidInput` and its subclasses ask for a changed request, and
    `Unavailable` for a later try. `DeadlineExceeded` means a spent budget, and `UpstreamError` a scheduler with an
    invalid answer. `NotFound` and `Conflict` mean what their names say.
    """

    async def submit(
        self,
        images: Images,
        *,
        labels: Labels | None = None,
        idempotency_key: str | None = None,
        patience_s: float | None = None,
        **policy: Unpack[PolicyFields],
    ) -> Job:
        """Submit images as one job; returns when the scheduler has stored them.

        Args:
            images: an array (n, height, width, 3) of uint8, or a sequence of arrays or PIL images of one size. Or the
                path of an image file, folder, .zip, .npz or .npy, encoded bytes, or a sequence of paths and bytes.
            labels: one class name, class index or None per image; then accuracy is reported.
            idempotency_key: names this submission; a second one with the same key returns the first one's job. By
                default a new key is made, so that a try whose answer was lost can be repeated without a second job.
            patience_s: seconds to keep trying while the scheduler is away, is a standby or takes no jobs. Default: a
                few seconds; see the client's `Backoff`.
            policy: scheme, deadline_s, task_deadline_s, privacy, encode_on, feature_form, weight, recovery,
                on_upstream_loss, escalate, escalate_from, escalate_accuracy, escalate_budget, batch_size, name, site,
                release.
        """
        if patience_s is not None and not patience_s >= 0:
            raise InvalidInput(f"patience_s must be 0 or more seconds, not {patience_s}")
        upload = await to_thread.run_sync(build_upload, images, labels, policy)
        headers = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}
        response = await self._request(
            "POST", "/v1/jobs", repeatable=True, headers=headers, upload=upload, patience_s=patience_s
        )
        return parse(Job, response.content)

    async def classify(
        self, images: Images, *, labels: Labels | None = None, **policy: Unpack[PolicyFields]
    ) -> AsyncGenerator[Event, None]:
        """Answer a few images at once, without a stored job: coarse first, then fine (or why there is none)."""
        upload = await to_thread.run_sync(build_upload, images, labels, policy)
        async with self._stream("POST", "/v1/classify", upload=upload) as chunks:
            async for line in iter_lines(chunks):
                kind = _kind_of(line)
                if kind == "done":
                    return
                if event := _read_event(kind, line):
                    yield event
        raise UpstreamError(f"the scheduler at {self.url} ended its answer in the middle")

    async def job(self, job: Job | str) -> Job:
        """The job as it is now."""
        return await self._get(Job, _path(job))

    async def jobs(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        state: JobState | str | None = None,
        site: str | None = None,
    ) -> JobPage:
        """One page of the list of jobs, newest first; `next_cursor` of a page asks for the next.

        Args:
            site: only jobs of this site.
        """
        return await self._get(JobPage, "/v1/jobs", limit=limit, cursor=cursor, state=state, site=site)

    async def results(self, job: Job | str) -> AsyncGenerator[ImageResult, None]:
        """Yield the results so far, one per image, in the order in which the images were sent."""
        async with self._stream("GET", f"{_path(job)}/results", params={"format": "jsonl"}) as chunks:
            async for line in iter_lines(chunks):
                yield parse(ImageResult, line)

    async def raw_results(
        self, job: Job | str, *, format: Literal["jsonl", "csv"] = "jsonl", bom: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """The same as text, in pieces of any length: one JSON object or one CSV row per image.

        Args:
            bom: begin a CSV with a byte order mark, by which spreadsheets know UTF-8.
        """
        params = {"format": format, **({"bom": "true"} if bom else {})}
        async with self._stream("GET", f"{_path(job)}/results", params=params) as chunks:
            async for chunk in chunks:
                yield chunk

    async def save_results(
        self,
        job: Job | str,
        path: str | os.PathLike[str],
        *,
        format: Literal["jsonl", "csv"] = "jsonl",
        bom: bool = False,
    ) -> None:
        """Write the results to a file, which appears when it is complete; arguments as of `raw_results`."""
        await _save(path, self.raw_results(job, format=format, bom=bom))

    async def events(self, job: Job | str, *, budget_s: float | None = None) -> AsyncGenerator[Event, None]:
        """Follow a job from its beginning until its final state: coarse and fine answers as they arrive.

        A broken connection is resumed where it broke, until the budget ends; without a budget, until a minute after the
        scheduler's last sign of life (`Backoff.outage_s`). The last event is the `StateChange` to the final state.

        Args:
            budget_s: `DeadlineExceeded` after this long.

        Raises:
            Unavailable: without a budget, the scheduler stayed away for longer than that.
        """
        async with aclosing(self._job_events(job, budget_s, {})) as events:
            async for event in events:
                yield event

    def _job_events(
        self, job: Job | str, budget_s: float | None, params: Mapping[str, str | float]
    ) -> AsyncGenerator[Event, None]:
        return self._follow(f"{_path(job)}/events", _id(job), budget_s, params, read=_read_event, is_last=_ends_job)

    async def _follow(
        self,
        path: str,
        what: str,
        budget_s: float | None,
        params: Mapping[str, str | float],
        *,
        read: Callable[[str, bytes], T | None],
        is_last: Callable[[T], bool],
    ) -> AsyncGenerator[T, None]:
        """Yield the events of a stream, which is resumed where it breaks.

        Args:
            what: name of the followed job or run in messages.
            read: returns an event from its kind and data; None for one to skip.
            is_last: True if an event is the last one.
        """
        patience = Patience(self._backoff, budget_s)
        after: str | None = None
        while True:
            events = self._event_stream(path, after, params, patience.sign_of_life)
            try:
                while True:
                    with anyio.fail_after(patience.left_s):
                        raw = await anext(events, None)
                    if raw is None:
                        raise Unavailable(f"the scheduler at {self.url} ended the event stream in the middle")
                    after = raw.id
                    event = read(raw.kind, raw.data)
                    if event is not None:
                        yield event
                        if is_last(event):
                            return
            except TimeoutError as exc:
                reason = f"; {patience.trouble}" if patience.trouble else ""
                raise DeadlineExceeded(f"{what} was not done within {budget_s:g} s{reason}") from exc
            except (Unavailable, UpstreamTimeout) as exc:
                await patience.outlast(exc)
            finally:
                await events.aclose()

    async def stream_results(
        self, job: Job | str, *, budget_s: float | None = None
    ) -> AsyncGenerator[ImageResult, None]:
        """Every image once, as soon as nothing better will come for it (fine, fallback or failed)."""
        seen = set[int]()
        patience = Patience(self._backoff, budget_s)
        async for event in self.events(job, budget_s=budget_s):
            if isinstance(event, FineResults | FallbackResults | FailedResults):
                for result in event.results:
                    if result.index not in seen:
                        seen.add(result.index)
                        yield result
        # A scheme without upper tiers ends with the coarse answers, a cancelled job with what it has.
        while True:
            try:
                async for result in self.results(job):
                    if result.index not in seen:
                        seen.add(result.index)
                        yield result
            except (Unavailable, UpstreamTimeout) as exc:
                await patience.outlast(exc)
            else:
                return

    async def wait(self, job: Job | str, *, budget_s: float | None = None) -> Job:
        """Wait until the job is done, whichever way it ends; `DeadlineExceeded` after `budget_s`. A budget of 0 looks
        once."""
        if budget_s == 0:
            seen = await self.job(job)
            if seen.done:
                return seen
            raise DeadlineExceeded(f"{_id(job)} is not done yet")
        async with aclosing(self._job_events(job, budget_s, {"only": "state"})) as events:
            async for event in events:
                if isinstance(event, StateChange) and event.job.done:
                    return event.job
        raise UpstreamError(f"the scheduler at {self.url} ended the events of {_id(job)} without a final state")

    async def attempts(
        self, job: Job | str, *, limit: int = 200, cursor: str | None = None, task: int | None = None
    ) -> AttemptPage:
        """One page of who tried which task and what came of it; `next_cursor` of a page asks for the next."""
        return await self._get(AttemptPage, f"{_path(job)}/attempts", limit=limit, cursor=cursor, task=task)

    async def explain(
        self, job: Job | str, *, limit: int = 200, cursor: str | None = None, task: int | None = None
    ) -> Explanation:
        """One page of why each task of a job went where it went; `next_cursor` of a page asks for the next."""
        return await self._get(Explanation, f"{_path(job)}/explain", limit=limit, cursor=cursor, task=task)

    async def cancel(self, job: Job | str) -> Job:
        """Stop a job; `Conflict` if it is done already."""
        response = await self._request("DELETE", _path(job), repeatable=False)
        return parse(Job, response.content)

    async def runs(self, *, limit: int = 50, cursor: str | None = None) -> RunPage:
        """One page of the list of training runs, newest first; `next_cursor` of a page asks for the next."""
        return await self._get(RunPage, "/v1/runs", limit=limit, cursor=cursor)

    async def run(self, run: RunSummary | str) -> Run:
        """The training run as it is now."""
        return await self._get(Run, _run_path(run))

    async def run_events(
        self, run: RunSummary | str, *, budget_s: float | None = None
    ) -> AsyncGenerator[RunProgress, None]:
        """Follow a training run until its end: a whole `Run` at first and whenever its state changes, a `RunProgress`
        after each report of its host. A broken connection is resumed; see `events`.

        Args:
            budget_s: `DeadlineExceeded` after this long.
        """
        events = self._follow(
            f"{_run_path(run)}/events",
            _run_id(run),
            budget_s,
            {},
            read=_read_run,
            is_last=lambda event: event.state.final,
        )
        async with aclosing(events):
            async for event in events:
                yield event

    async def stop_run(self, run: RunSummary | str) -> Run:
        """Ask the host of a training run to end it; `Conflict` if it has ended already."""
        response = await self._request("DELETE", _run_path(run), repeatable=False)
        return parse(Run, response.content)

    async def match(self, offer: WorkerOffer) -> RunMatch:
        """For workers: the training run that this one is sent to; `Unavailable` while none wants it."""
        answer = await self._request("POST", "/v1/matches", repeatable=True, upload=json_upload(offer))
        return parse(RunMatch, answer.content)

    async def order_worker(self, run: RunSummary | str, worker: str, order: WorkerOrder) -> Run:
        """Ask the host of a training run to pause, drop, trust or resume one of its workers; `NotFound` if it has none
        of this name."""
        path = f"{_run_path(run)}/workers/{_segment('worker', worker)}"
        upload = json_upload(WorkerWish(order=order))
        return parse(Run, (await self._request("PUT", path, repeatable=True, upload=upload)).content)

    async def order_at_host(self, worker: str, order: WorkerOrder) -> RunWorker:
        """Order the same directly at the run's host, if this client is connected to it instead of the scheduler.
        Returns the worker after the order."""
        path = f"/v1/workers/{_segment('worker', worker)}/order"
        upload = json_upload(WorkerWish(order=order))
        return parse(RunWorker, (await self._request("PUT", path, repeatable=True, upload=upload)).content)

    async def invite(self, run: RunSummary | str, *, uses: int = 1, expires_s: float = 604_800.0) -> Invitation:
        """Make a token with which workers may come to a training run, under a limited number of names."""
        upload = json_upload(InvitationWish(uses=uses, expires_s=expires_s))
        answer = await self._request("POST", f"{_run_path(run)}/invitations", repeatable=False, upload=upload)
        return parse(Invitation, answer.content)

    async def uninvite(self, run: RunSummary | str, name: str) -> None:
        """End an invitation to a training run."""
        path = f"{_run_path(run)}/invitations/{quote(name, safe='')}"
        await self._request("DELETE", path, repeatable=False)

    async def begin_run(self, start: RunStart) -> BegunRun:
        """For hosts: begin a training run, or continue it."""
        answer = await self._request("POST", "/v1/runs", repeatable=True, upload=json_upload(start))
        return parse(BegunRun, answer.content)

    async def offer_runs(self, offer_id: str, offer: HostOffer) -> OfferOrders:
        """For hosts that wait: the runs that they would train, and the one to start."""
        path, upload = f"/v1/offers/{offer_id}", json_upload(offer)
        return parse(OfferOrders, (await self._request("PUT", path, repeatable=True, upload=upload)).content)

    async def report_run(self, run: str, report: RunReport) -> RunOrders:
        """For hosts: what the run has come to, and what its host is to do."""
        path = f"{_run_path(run)}/report"
        return parse(RunOrders, (await self._request("PUT", path, repeatable=True, upload=json_upload(report))).content)

    async def devices(self, *, site: str | None = None) -> tuple[Device, ...]:
        """The nodes that the scheduler knows, of a site if one is named."""
        return (await self._get(DeviceList, "/v1/devices", site=site)).devices

    async def drain(self, node_id: str) -> None:
        """Give a node no new tasks, until it is resumed."""
        await self._request("POST", f"{_device_path(node_id)}/drain", repeatable=True)

    async def resume(self, node_id: str) -> None:
        """Give a drained node tasks again, or let a removed one register; `Conflict` if it shuts down by itself."""
        await self._request("DELETE", f"{_device_path(node_id)}/drain", repeatable=True)

    async def remove(self, node_id: str) -> None:
        """Take a node's work away, and let it not register until it is resumed."""
        await self._request("DELETE", _device_path(node_id), repeatable=True)

    async def forget(self, node_id: str) -> None:
        """Strike a dead or removed node off the device list; `Conflict` if it has not ended."""
        await self._request("DELETE", _device_path(node_id), repeatable=False, params={"forget": "true"})

    async def trust(self, node_id: str, trusted: bool | None) -> None:
        """Say whether a node may see pixels; None: as the scheduler's setting says."""
        said = {True: "yes", False: "no", None: "default"}[trusted]
        await self._request("PUT", f"{_device_path(node_id)}/trust", repeatable=True, params={"trusted": said})

    async def sites(self) -> tuple[SiteNow, ...]:
        """The sites of the fleet; empty if no node names one."""
        return (await self._get(SiteList, "/v1/sites")).sites

    async def site(self, name: str) -> SiteNow:
        """A site as it is now; `NotFound` if no node belongs to it."""
        return await self._get(SiteNow, _site_path(name))

    async def drain_site(self, name: str) -> tuple[str, ...]:
        """Give the nodes of a site no new tasks until it is resumed. Returns their ids."""
        return await self._change_site("POST", f"{_site_path(name)}/drain")

    async def resume_site(self, name: str) -> tuple[str, ...]:
        """Give the nodes of a drained site tasks again, or let removed nodes register. Returns their ids."""
        return await self._change_site("DELETE", f"{_site_path(name)}/drain")

    async def remove_site(self, name: str, *, forget: bool = False) -> tuple[str, ...]:
        """Take the work of a site's nodes away, and keep them out until the site is resumed. Returns their ids.

        Args:
            forget: strike the nodes that are dead or removed off the device list instead.
        """
        return await self._change_site("DELETE", _site_path(name), **({"forget": "true"} if forget else {}))

    async def _change_site(self, method: str, path: str, **params: str) -> tuple[str, ...]:
        response = await self._request(method, path, repeatable=not params, params=params)
        return parse(SiteChange, response.content).nodes

    async def sources(self, *, site: str | None = None) -> tuple[SourceNow, ...]:
        """The sources of all devices that the caller may see, by node and name; of a site if one is named."""
        return (await self._get(SourceList, "/v1/sources", site=site)).sources

    async def set_rights(self, node: str, source: str, *, owner: str | None, readers: Iterable[str]) -> SourceRights:
        """Replace the owner and the readers of a source; `Forbidden` for users who do not own it.

        Args:
            owner: name of a token.
            readers: names of tokens.
        """
        path = f"/v1/sources/{_segment('node', node)}/{_segment('source', source)}/rights"
        rights = SourceRights(owner=owner, readers=tuple(readers))
        return parse(
            SourceRights, (await self._request("PUT", path, repeatable=True, upload=json_upload(rights))).content
        )

    async def node_sources(self, node_id: str) -> SourcesReport:
        """The sources of a node, its spool and its uplink, as the node reports them; `NotFound` if it has none."""
        return await self._get(SourcesReport, f"{_device_path(node_id)}/sources")

    async def add_source(self, node_id: str, name: str, url: str = "", **fields: Unpack[SourceFields]) -> None:
        """Add a source to a node; `Forbidden` if the node does not allow it.

        Args:
            fields: the others of the `[[source]]` table.
        """
        upload = json_upload({"name": name, **({"url": url} if url else {}), **fields})
        await self._request("POST", f"{_device_path(node_id)}/sources", repeatable=False, upload=upload)

    async def remove_source(self, node_id: str, name: str) -> None:
        """Remove a source from a node. Its observations stay."""
        await self._request("DELETE", _source_path(node_id, name), repeatable=False)

    async def pause_source(self, node_id: str, name: str) -> None:
        """Stop a source from taking pictures until it is resumed."""
        await self._request("POST", f"{_source_path(node_id, name)}/pause", repeatable=True)

    async def resume_source(self, node_id: str, name: str) -> None:
        """Let a paused source continue."""
        await self._request("DELETE", f"{_source_path(node_id, name)}/pause", repeatable=True)

    async def observations(
        self, *, after: int = 0, **filters: Unpack[ObservationFilters]
    ) -> AsyncGenerator[SeenPicture | SeenGap, None]:
        """All pictures that sources have seen, with their answers, by node, source and sequence number. A `SeenGap`
        names numbers that a device has lost. Gaps come only if `source`, `node` and `after` are the only conditions.

        Args:
            after: only higher sequence numbers.
        """
        params = {"format": "jsonl", **_sought(filters, after=after)}
        async with self._stream("GET", f"{_OBSERVATIONS}/export", params=params) as chunks:
            async for line in iter_lines(chunks):
                yield parse(SeenGap, line) if line.startswith(_GAP) else parse(SeenPicture, line)

    async def observation_page(
        self, *, limit: int = 100, cursor: str | None = None, **filters: Unpack[ObservationFilters]
    ) -> ObservationPage:
        """One page of observations, newest first; `next_cursor` of a page asks for the next. A page may be short or
        empty and have a next one, because the scheduler looks at a limited number of observations at a time."""
        return await self._get(ObservationPage, _OBSERVATIONS, limit=limit, cursor=cursor, **_sought(filters))

    async def follow_observations(
        self,
        *,
        source: str | None = None,
        node: str | None = None,
        site: str | None = None,
        label: str | None = None,
        below: float | None = None,
    ) -> AsyncGenerator[SeenPicture, None]:
        """Observations from now on, in the order in which they reach the scheduler, each again whenever it is amended.
        A broken connection is resumed where it broke, as in `events`.

        Args:
            source: only observations of this source.
            node: only observations of this device.
            site: only observations of this site.
            label: only answers of this class, or of a class in this superclass.
            below: only answers with a confidence below this.

        Raises:
            Unavailable: the scheduler stayed away for longer than `Backoff.outage_s`.
        """
        params = _sought({"source": source, "node": node, "site": site, "label": label, "below": below})
        path = f"{_OBSERVATIONS}/events"
        events = self._follow(path, "observations", None, params, read=_read_seen, is_last=lambda _: False)
        async with aclosing(events):
            async for seen in events:
                yield seen

    async def save_observations(
        self,
        path: str | os.PathLike[str],
        *,
        format: Literal["jsonl", "csv"] = "jsonl",
        bom: bool = False,
        after: int = 0,
        **filters: Unpack[ObservationFilters],
    ) -> None:
        """Write observations to a file, which appears when it is complete.

        Args:
            bom: begin a CSV with a byte order mark, by which spreadsheets know UTF-8.
            after: only higher sequence numbers.
        """
        params = {"format": format, **({"bom": "true"} if bom else {}), **_sought(filters, after=after)}
        async with self._stream("GET", f"{_OBSERVATIONS}/export", params=params) as chunks:
            await _save(path, chunks)

    async def picture(self, node: str, source: str, sequence: int, *, size: int | None = None) -> bytes:
        """The picture of an observation as a JPEG, PNG or WebP file; `NotFound` if the scheduler does not have it.

        Args:
            size: pixels of the longer side of a smaller copy, 16 to 512. Default: the picture as it was sent.
        """
        path = f"{_OBSERVATIONS}/{_segment('node', node)}/{_segment('source', source)}/{sequence}/picture"
        params = {} if size is None else {"size": size}
        return (await self._request("GET", path, repeatable=True, params=params)).content

    async def label(self, node: str, source: str, sequence: int, label: str) -> None:
        """Label the picture of an observation with a class; the last label counts. `NotFound` if the scheduler does
        not have the picture, `InvalidInput` if there is no such class."""
        upload = json_upload(NewLabel(label=label))
        await self._request("PUT", _label_path(node, source, sequence), repeatable=True, upload=upload)

    async def take_label_back(self, node: str, source: str, sequence: int) -> None:
        """Remove the label of a picture; `Forbidden` for users who have not set it."""
        await self._request("DELETE", _label_path(node, source, sequence), repeatable=False)

    async def picture_page(
        self,
        which: Literal["disagree", "labelled", "answered"],
        *,
        limit: int = 50,
        cursor: str | None = None,
        **filters: Unpack[PictureFilters],
    ) -> ObservationPage:
        """One page of the pictures that the scheduler has; `next_cursor` of a page asks for the next.

        Args:
            which: `disagree`: pictures without a label whose answers differ or were unsure, the most useful first.
                `labelled`: pictures with a label. `answered`: others with an answer from above.
        """
        path = "/v1/learning/pictures"
        return await self._get(ObservationPage, path, which=which, limit=limit, cursor=cursor, **filters)

    async def learning(self) -> LearningNow:
        """The kept pictures of devices, and the agreement of the tiers on audited pictures."""
        return await self._get(LearningNow, "/v1/learning")

    async def improvements(self) -> tuple[Improvement, ...]:
        """The newest improvements of releases, the newest first."""
        return (await self._get(ImprovementList, "/v1/improvements")).improvements

    async def put_improvement(self, improvement: Improvement) -> Improvement:
        """Tell the scheduler how far an improvement is; returns what it has stored."""
        path = f"/v1/improvements/{improvement.id}"
        return parse(
            Improvement, (await self._request("PUT", path, repeatable=True, upload=json_upload(improvement))).content
        )

    async def sinks(self) -> SinkList:
        """All receivers of events, and the kinds that can be added; for admins, as are all calls about sinks."""
        return await self._get(SinkList, "/v1/sinks")

    async def sink(self, name: str) -> SinkNow:
        """A sink as it is now; `NotFound` if there is none."""
        return await self._get(SinkNow, _sink_path(name))

    async def add_sink(
        self, name: str, kind: str, options: Mapping[str, Any], *, filter: SinkFilter | None = None
    ) -> SinkNow:
        """Deliver events to a receiver from now on; `Conflict` if the name is taken.

        Args:
            kind: webhook, or another one that is installed on the scheduler's machine.
            options: of the kind.
            filter: which events; None: all.
        """
        try:
            wanted = NewSink(name=name, kind=kind, options=options, filter=filter or SinkFilter())
        except ValidationError as exc:
            raise InvalidInput(faults(exc, NewSink)) from exc
        answer = await self._request("POST", "/v1/sinks", repeatable=False, upload=json_upload(wanted))
        return parse(SinkNow, answer.content)

    async def remove_sink(self, name: str) -> None:
        """Forget a sink, its events and its dead letters."""
        await self._request("DELETE", _sink_path(name), repeatable=True)

    async def pause_sink(self, name: str) -> SinkNow:
        """Hold the events of a sink until it is resumed."""
        return parse(SinkNow, (await self._request("POST", f"{_sink_path(name)}/pause", repeatable=True)).content)

    async def resume_sink(self, name: str) -> SinkNow:
        """Deliver again, over a new connection."""
        return parse(SinkNow, (await self._request("DELETE", f"{_sink_path(name)}/pause", repeatable=True)).content)

    async def test_sink(self, name: str) -> SinkTested:
        """Send a receiver a test event; `UpstreamError` if it does not take it."""
        return parse(SinkTested, (await self._request("POST", f"{_sink_path(name)}/test", repeatable=False)).content)

    async def dead_letters(self, name: str, *, after: int = 0, limit: int = 100) -> DeadLetterPage:
        """Events that the receiver refused or did not take in time, by number.

        Args:
            after: only higher numbers.
        """
        return await self._get(DeadLetterPage, f"{_sink_path(name)}/dead", after=str(after), limit=str(limit))

    async def replay(self, name: str, numbers: Iterable[int] | None = None) -> int:
        """Deliver dead letters again; returns their number.

        Args:
            numbers: of their events; None: all.
        """
        upload = json_upload(ReplayRequest(numbers=None if numbers is None else tuple(numbers)))
        return parse(
            Replayed,
            (await self._request("POST", f"{_sink_path(name)}/replay", repeatable=True, upload=upload)).content,
        ).count

    async def mapping(self, *, site: str | None = None) -> dict[str, Any]:
        """Return the upstream node of each end device with the reason, and the paper's formulas with the present
        figures; of all sites, or of one."""
        return await self._get(dict[str, Any], "/v1/mapping", site=site)

    async def fleet(self, *, site: str | None = None) -> dict[str, Any]:
        """Nodes, links and unfinished jobs as they are now; of a site, with the upstream nodes that it shares."""
        return await self._get(dict[str, Any], "/v1/fleet", site=site)

    async def whoami(self) -> dict[str, Any]:
        """`name`, `role` and `expires` of the token; all None if the scheduler asks for none."""
        return await self._get(dict[str, Any], "/v1/whoami")

    async def info(self) -> dict[str, Any]:
        """Version and limits of the scheduler, the networks' input shape and the label hierarchy."""
        return await self._get(dict[str, Any], "/v1/info")

    async def models(self) -> dict[str, Any]:
        """The manifest of the release in force: classes, networks with their sha256, and encoders."""
        return await self._get(dict[str, Any], "/v1/models")

    async def releases(self) -> ReleaseList:
        """All releases, the newest first, and the change that is under way."""
        return await self._get(ReleaseList, "/v1/releases")

    async def release(self, release: str) -> ReleaseNow:
        """A release as it is now; `NotFound` if there is none.

        Args:
            release: NAME@NUMBER, or the number.
        """
        return await self._get(ReleaseNow, _release_path(release))

    async def release_manifest(self, release: str) -> dict[str, Any]:
        """The manifest of a release: classes, networks with their sha256, and encoders."""
        return await self._get(dict[str, Any], f"{_release_path(release)}/manifest")

    async def save_network(self, path: str | os.PathLike[str], name: str, sha256: str) -> None:
        """Write the file of a network or of an encoder, as a manifest names it, to a file that appears when it is
        complete. The content is not checked. `NotFound` if the scheduler does not have it."""
        place = f"/v1/models/{_segment('model', name)}/file"
        async with self._stream("GET", place, params={"sha256": sha256}) as chunks:
            await _save(path, chunks)

    async def create_release(
        self,
        name: str,
        models: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        tuning: Mapping[str, Any] | None = None,
    ) -> ReleaseNow:
        """Make a release, which answers nothing until it is started or promoted. A release of this name with the same
        content is returned as it is.

        Args:
            models: folder of a model set, whose files are sent as far as the scheduler lacks them. Or the content of a
                manifest whose files it has. None: the model set of the scheduler's own folder.
            tuning: content of `escalation.json`, with a manifest. A folder has its own.

        Raises:
            InvalidInput: the name or the manifest is wrong, or a file of the folder is damaged.
            Conflict: the scheduler lacks files; it names them.
        """
        if models is None or isinstance(models, Mapping):
            wanted: dict[str, Any] = {"manifest": models, "tuning": tuning}
        else:
            if tuning is not None:
                raise InvalidInput("a folder has its thresholds itself: give `tuning` with a manifest only")
            found = await to_thread.run_sync(read_model_set, models)
            wanted = {"manifest": found.manifest, "tuning": found.tuning}
            for sha256, path in found.files.items():
                await self._send_network(sha256, path)
        request = _checked(NewRelease, {"name": name, **wanted})
        response = await self._request("POST", "/v1/releases", repeatable=True, upload=json_upload(request))
        return parse(ReleaseNow, response.content)

    async def download_network(self, name: str, sha256: str, path: str | os.PathLike[str]) -> None:
        """Write the file of a network to `path`, which is replaced once the content has the right digest.

        Args:
            name: in the manifest of a release; NAME.KIND-head for the head of an encoder.

        Raises:
            NotFound: the scheduler does not have it.
            UpstreamError: the content has another digest.
        """
        digest, part = hashlib.sha256(), anyio.Path(f"{os.fspath(path)}.part")
        place = f"/v1/models/{_segment('network', name)}/file"
        async with self._stream("GET", place, params={"sha256": sha256}) as chunks, await part.open("wb") as file:
            async for chunk in chunks:
                digest.update(chunk)
                await file.write(chunk)
        if digest.hexdigest() != sha256:
            await part.unlink()
            raise UpstreamError(f"the scheduler at {self.url} sent another file than {name!r} ({sha256})")
        await part.replace(os.fspath(path))

    async def _send_network(self, sha256: str, path: Path) -> None:
        """Send a network unless the scheduler has it."""
        place = f"/v1/networks/{sha256}"
        try:
            # A HEAD request would get errors without their sentence.
            async with self._stream("GET", place, headers={"Range": "bytes=0-0"}):
                return
        except NotFound:
            upload = await to_thread.run_sync(file_upload, path, sha256)
            await self._request("PUT", place, repeatable=True, upload=upload)

    async def start_release(
        self,
        release: str,
        *,
        canary: float | None = None,
        guards: Mapping[GuardName, float] | None = None,
        for_s: float | None = None,
    ) -> Rollout:
        """Try a release on a part of the end devices. If the guards hold it rolls out to all nodes, otherwise it is
        rolled back.

        Args:
            canary: share of the end devices, and of new jobs, between 0 and 1. Default: a tenth.
            guards: limits by name. `agreement`: least ratio of the new agreement with the tier above to the old one.
                `p99`: largest ratio of the 99th percentiles of latency. `errors`: largest share of failed attempts.
                Default: agreement 0.97, p99 1.3, errors 0.005.
            for_s: length of the trial in seconds. Default: two hours.

        Raises:
            Conflict: another change is under way, or the release cannot be held next to the present one.
        """
        given = {"canary": canary, "guards": guards, "for_s": for_s}
        request = _checked(StartRequest, {key: value for key, value in given.items() if value is not None})
        upload = json_upload(request.model_dump(exclude_unset=True))
        return await self._change_release("start", release, upload)

    async def promote_release(self, release: str) -> Rollout:
        """Give a release to all nodes at once, without guards."""
        return await self._change_release("promote", release)

    async def stop_release(self, release: str) -> Rollout:
        """End the trial of a release."""
        return await self._change_release("stop", release)

    async def roll_back(self, release: str | None = None) -> Rollout:
        """Return to the release before.

        Args:
            release: the release to leave. Default: the release that is rolling out, otherwise the one in force.
        """
        if release is None:
            now = await self.releases()
            release = now.rollout.release if now.rollout else now.in_force
        return await self._change_release("rollback", release)

    async def prune_releases(self, *, dry_run: bool = True) -> Pruned:
        """Remove releases and networks that nothing refers to.

        Args:
            dry_run: only return what would be removed.
        """
        params = {"dry_run": str(dry_run).lower()}
        response = await self._request("DELETE", "/v1/releases", repeatable=True, params=params)
        return parse(Pruned, response.content)

    async def _change_release(self, change: str, release: str, upload: UploadBody | None = None) -> Rollout:
        # A repetition after a lost answer could meet the change that it has made itself, as a conflict.
        path = f"{_release_path(release)}/{change}"
        return parse(Rollout, (await self._request("POST", path, repeatable=False, upload=upload)).content)

    async def _get(self, kind: type[T], path: str, **params: str | float | None) -> T:
        given = {name: value for name, value in params.items() if value is not None}
        response = await self._request("GET", path, repeatable=True, params=given)
        return parse(kind, response.content)

    async def _event_stream(
        self, path: str, after: str | None, params: Mapping[str, str | float], heard: Callable[[], None]
    ) -> AsyncGenerator[ServerSentEvent, None]:
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = after
        async with self._stream(
            "GET",
            path,
            params=params,
            headers=headers,
            read_timeout_s=_STREAM_SILENCE_S,
            patient=False,  # its caller is
        ) as chunks:
            async for event in iter_server_sent_events(_hearing(iter_lines(chunks), heard)):
                yield event


async def _hearing(lines: AsyncIterator[bytes], heard: Callable[[], None]) -> AsyncIterator[bytes]:
    """The lines of an event stream; calls `heard` after each event, and for the comments of a quiet stream."""
    async for line in lines:
        if not line or line.startswith(b":"):
            heard()
        yield line


def _id(job: Job | str) -> str:
    return job.id if isinstance(job, Job) else job


def _path(job: Job | str) -> str:
    return f"/v1/jobs/{_segment('job', _id(job))}"


def _run_path(run: RunSummary | str) -> str:
    return f"/v1/runs/{_segment('training run', _run_id(run))}"


def _run_id(run: RunSummary | str) -> str:
    return run.id if isinstance(run, RunSummary) else run


def _sink_path(name: str) -> str:
    return f"/v1/sinks/{_segment('sink', name)}"


def _device_path(node_id: str) -> str:
    return f"/v1/devices/{_segment('node', node_id)}"


def _label_path(node: str, source: str, sequence: int) -> str:
    return f"{_OBSERVATIONS}/{_segment('node', node)}/{_segment('source', source)}/{sequence}/label"


def _site_path(name: str) -> str:
    return f"/v1/sites/{_segment('site', name)}"


def _release_path(release: str) -> str:
    return f"/v1/releases/{_segment('release', release)}"


def _checked(kind: type[M], fields: Mapping[str, Any]) -> M:
    """Return a request of valid fields.

    Raises:
        InvalidInput: a field is wrong; the message names it.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as exc:
        raise InvalidInput(faults(exc, kind)) from exc


def _source_path(node_id: str, name: str) -> str:
    return f"{_device_path(node_id)}/sources/{_segment('source', name)}"


def _sought(filters: ObservationFilters, *, after: int = 0) -> dict[str, str | float]:
    """Conditions as parameters of a query."""
    since = filters.get("since")
    given = {
        "source": filters.get("source"),
        "node": filters.get("node"),
        "site": filters.get("site"),
        "label": filters.get("label"),
        "since": None if since is None else since.astimezone().isoformat(),
        "below": filters.get("below"),
        "amended": "true" if filters.get("amended") else None,
        "after": after or None,
    }
    return {name: value for name, value in given.items() if value is not None}


async def _save(path: str | os.PathLike[str], chunks: AsyncIterator[bytes]) -> None:
    """Write a file, which appears when it is complete."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        async with await anyio.open_file(partial, "wb") as file:
            async for chunk in chunks:
                await file.write(chunk)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _segment(kind: str, name: str) -> str:
    """An id that a user typed, as one segment of a path.

    Raises:
        NotFound: it would be several, or none: a slash is one for servers even where it is escaped.
    """
    if "/" in name or name in ("", ".", ".."):
        raise NotFound(f"no {kind} {name!r}")
    return quote(name, safe="")


def _read_event(kind: str, data: bytes) -> Event | None:
    """An event of a stream; None for a kind that this client does not know yet."""
    if kind == "state":
        return StateChange(job=parse(Job, data))
    results = _RESULT_EVENTS.get(kind)
    return parse(results, data) if results else None


def _ends_job(event: Event) -> bool:
    return isinstance(event, StateChange) and event.job.done


def _read_run(kind: str, data: bytes) -> RunProgress | None:
    """An event of a run; None for a kind that this client does not know yet."""
    if kind == "state":
        return parse(Run, data)
    return parse(RunProgress, data) if kind == "report" else None


def _read_seen(kind: str, data: bytes) -> SeenPicture | None:
    """An event of the observations; None for a kind that this client does not know yet."""
    return parse(SeenPicture, data) if kind in ("observation", "amended") else None


def _kind_of(line: bytes) -> str:
    """Return the event kind of a line of the answer to `classify`; raises the error of an error line."""
    match parse(dict[str, Any], line):
        case {"event": "error", "error": str(message)}:
            raise UpstreamError(message)
        case {"event": str(kind)}:
            return kind
    raise UpstreamError("the scheduler sent a line that is not an event")
