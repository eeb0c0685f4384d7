"""A tier node: models that are served, measured, watched and offered. End, edge and cloud nodes are made of this."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import aiohttp
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from tierkit.distribution import installed_version
from tierkit.errors import NoRoom
from tierkit.http.address import reachable_url
from tierkit.http.answering import Answering, install
from tierkit.http.client import Meter, open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.shell import Direct, answer_directly
from tierkit.inference.copies import COPIES_PATH, NetworkCopies
from tierkit.inference.endpoints import InferEndpoint, oip_routes
from tierkit.inference.files import FileDecoder
from tierkit.inference.heartbeat import HeartbeatSender
from tierkit.inference.holding import UNKNOWN, Holding, ReleaseSource
from tierkit.inference.metrics import ModelMetrics, ShareMetrics
from tierkit.inference.model import Divisible, Model
from tierkit.inference.repository import Repository
from tierkit.inference.runner import ModelRunner
from tierkit.inference.served import (
    NO_SUBSTITUTES,
    HeldEncoders,
    Loaded,
    ModelKey,
    ReleaseParts,
    ServedModels,
    Substitutes,
)
from tierkit.inference.sharing import ShareTurns
from tierkit.inference.thread import InferenceThread
from tierkit.inference.versions import Gone, Version, Versions
from tierkit.settings import NodeSettings, ScheduledBy
from tierkit.types import Tier
from tierkit.wire.messages import EncoderOffer, Heartbeat, ModelOffer, Registration, classes_digest
from tierkit.wire.oip import Limits

__all__ = ["InferenceNode", "node_app"]

log = logging.getLogger(__name__)

_RUNTIME_WARM_UP_S = 0.05
"""Seconds to measure the speed of a model that is loaded while the node serves: requests wait for that."""

_MOST_OFFERS = 64
"""Models in a registration."""

_COPIES_BUDGET_S = 30.0
"""The scheduler may keep a node waiting for a source."""

_ANNOUNCE_BUDGET_S = 10.0
"""Seconds for the schedulers to hear that a model is not offered any more, before it is unloaded."""


class _Release:
    """Models and encoders of one release."""

    def __init__(self, models: Sequence[ModelKey], encoders: Sequence[EncoderOffer]) -> None:
        self.models = tuple(models)
        self.encoders = tuple(encoders)


class InferenceNode:
    """The models of one node process, behind one inference thread.

    Args:
        settings: settings of the node.
        models: models that it serves.
        lifecycle: lifecycle of the process; its readiness then depends on the models.
        encoders: encoders that it also runs.
        substitutes: replacements of parts of the node.
    """

    def __init__(
        self,
        settings: NodeSettings,
        models: Sequence[Model] | ServedModels,
        lifecycle: Lifecycle,
        encoders: HeldEncoders | None = None,
        *,
        substitutes: Substitutes = NO_SUBSTITUTES,
    ) -> None:
        served = substitutes.served(models if isinstance(models, ServedModels) else ServedModels(ready=models))
        everything = [*served.ready, *(model for others in served.standby.values() for model in others)]
        self._substitutes = substitutes
        self.http: aiohttp.ClientSession
        """Client for its own requests, while it is running."""
        self._engine = served.engine
        self.encoders = encoders
        self.scheduler: HeartbeatSender | None = None
        """The connection to the first scheduler, while the node is running; None without one."""
        self.settings = settings
        self.tier = Tier(settings.service)
        self.lifecycle = lifecycle
        self.version = installed_version()
        self.incarnation = secrets.token_hex(8)
        """Fresh at each start: work given to an earlier process of the same name is void."""
        self.files = FileDecoder()
        """Decodes what comes as files, while the node is running."""
        self._schedulers = settings.schedulers
        several = len(self._schedulers) > 1
        turns = ShareTurns([each.name for each in self._schedulers] if several else ())
        self._thread = InferenceThread(_cores(everything), turns)
        self.versions = Versions()
        """The models that it serves."""
        keys = [ModelKey.of(model) for model in everything]
        for version in self._made(served, keys):
            self.versions.add(version)
        self.versions.arrange(keys)
        self.copies: NetworkCopies | None = None
        """Gets networks from other nodes, and passes them on; None if the networks are the node's own."""
        self.holding: Holding | None = None
        """Follows the releases of the scheduler; None if the networks are the node's own."""
        self._releases = {UNKNOWN: _Release(keys, () if encoders is None else encoders.offers)}
        self._senders: list[HeartbeatSender] = []
        self._offers: tuple[ModelOffer, ...] = ()
        self._share_metrics = ShareMetrics(turns.shares, self._counted) if several else None
        self.repository = Repository(self.versions)

    @property
    def allowed_upstreams(self) -> tuple[str, ...]:
        """URLs below which a node must lie for this one to send images or features there; empty for anywhere."""
        return ()

    @property
    def meter(self) -> Meter | None:
        """Counter of the bytes that the node sends and receives with its own requests; None to count nothing."""
        return None

    def heard(self, headers: Mapping[str, str]) -> None:
        """The scheduler has answered a request."""
        if self.holding is not None:
            self.holding.heard(headers)

    @property
    def default_runner(self) -> ModelRunner:
        """Runner of the first model, which the node serves if a request names none."""
        return self.versions.default.runner

    @property
    def release(self) -> int:
        """Number of the release that answers by default; 0 if the node does not know."""
        return UNKNOWN if self.holding is None else max(UNKNOWN, self.holding.usable[0])

    @property
    def usable_releases(self) -> Sequence[int]:
        """Numbers of the releases that are served, without those that turned out broken unless all are."""
        return (UNKNOWN,) if self.holding is None else self.holding.usable

    def version_of(self, release: int) -> Version:
        """The version that answers by default in a release."""
        return self.versions.held[self._releases[release].models[0]]

    def check_model(self, model: Model) -> None:
        """Check that the node can answer with a model. Raises SetupError."""

    # --- releases ---

    def follow(self, releases: ReleaseSource | None) -> None:
        """Follow the releases of the scheduler, beginning with the release of its present models; None to hold only
        that. Call it before the node runs."""
        if releases is not None:
            self.holding = Holding(self, releases, self.lifecycle)
            self.rename(UNKNOWN, releases.started_with)
            self.copies = NetworkCopies(
                self.settings,
                self.incarnation,
                self._ask_for_copies,
                lambda: self.http,
                lambda: self.lifecycle.in_flight > 0,
            )
            self.lifecycle.keyed_path = f"{COPIES_PATH}/"

    async def _ask_for_copies(self, report: bytes) -> bytes:
        assert self.scheduler is not None
        target = f"/v1/devices/{self.settings.node_id}/copies"
        return await self.scheduler.ask("POST", target, budget_s=_COPIES_BUDGET_S, body=report)

    @property
    def loaded(self) -> Loaded:
        """Models and encoders that it has loaded."""
        encoders = () if self.encoders is None else self.encoders.offers
        # The scheduler tells only nodes of its list from whom to copy.
        copies = self.copies if self.scheduler is not None and self.scheduler.registered else None
        held = frozenset(self.versions.held)
        return Loaded(models=held, encoders=frozenset(encoders), serving=True, copies=copies)

    async def hold(self, number: int, parts: ReleaseParts) -> None:
        """Serve a release next to the others, once its models have proved that they work.

        Raises:
            NoRoom: with it the node would hold too many models.
            WeightsError: a model answers with NaN or infinity.
            SetupError: the node cannot answer with one of them.
            Exception: any error of a model.
        """
        if len(self.versions.held.keys() | set(parts.models)) > _MOST_OFFERS:
            raise NoRoom(f"this node offers at most {_MOST_OFFERS} networks and tails at a time")
        made = self._made(self._substitutes.served(parts.served), parts.models)
        entered: list[Version] = []
        try:
            for version in made:
                self.check_model(version.runner.model)
                entered.append(version)
                await self._run(version, warm_up_s=_RUNTIME_WARM_UP_S)
                if version.like is None:
                    await version.runner.examine()
            if self.encoders is not None:
                await self.encoders.hold(parts.heads)
        except BaseException:
            for version in entered:
                await version.runner.__aexit__(None, None, None)
                self._forget_metrics(version)
            raise
        for version in made:
            self.versions.add(version)
            self._add_check(version.key.name)
        self._releases[number] = _Release(parts.models, parts.encoders)

    async def arrange(self, numbers: Sequence[int]) -> None:
        """Serve these releases, the first one by default. The others are taken away once the schedulers know and their
        last request is answered."""
        kept = [self._releases[number] for number in numbers]
        gone = [release for number, release in self._releases.items() if number not in numbers]
        models = [key for release in kept for key in release.models]
        encoders = [offer for release in kept for offer in release.encoders]
        # Those that go can be found until the schedulers know: a request for one may be on its way.
        self.versions.arrange([*models, *(key for release in gone for key in release.models)])
        self._releases = {number: self._releases[number] for number in numbers}
        self._make_offers(models)
        if self.encoders is not None:
            self.encoders.offer(encoders)
        announced = [sender.renew() for sender in self._senders]
        if gone:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANNOUNCE_BUDGET_S):
                    await asyncio.gather(*(event.wait() for event in announced))
        for version in self.versions.arrange(models):
            await version.close()
            self.versions.remove(version)
            self._forget_metrics(version)
            if not self.versions.named(version.key.name):
                self.lifecycle.remove_check(f"model {version.key.name}")
            log.info("model unloaded", extra={"model": version.key.name, "sha256": version.key.sha256})
        if self.encoders is not None:
            await self.encoders.drop()

    def give_up(self, version: Version, why: str) -> None:
        """Report the releases of a version as unusable, and serve the next one."""
        if self.holding is not None:
            for number, release in self._releases.items():
                if release.models[0] == version.key:
                    self.holding.broken(number, why)

    def rename(self, number: int, new: int) -> None:
        """Give a release another number."""
        self._releases[new] = self._releases.pop(number)

    # --- models that no request finds ---

    async def run_hidden(self, model: Model) -> Version:
        """Run a model for the node's own use, once it has proved that it works. Requests cannot find it. `end_hidden`
        takes it away.

        Raises:
            WeightsError: it answers with NaN or infinity.
            SetupError: the node cannot answer with it.
            Exception: any error of the model.
        """
        version = self._version(model, ServedModels(ready=(model,)))
        try:
            self.check_model(model)
            await self._run(version, warm_up_s=_RUNTIME_WARM_UP_S)
            await version.runner.examine()
        except BaseException:
            await version.runner.__aexit__(None, None, None)
            self._forget_metrics(version)
            raise
        return version

    async def end_hidden(self, version: Version) -> None:
        """Unload such a model when its last answer is given."""
        await version.close()
        self._forget_metrics(version)

    def _made(self, served: ServedModels, keys: Sequence[ModelKey]) -> list[Version]:
        """A version of each model, not running yet.

        Args:
            keys: of all models of the release, including those that are held already.
        """
        made = {(version := self._version(model, served)).key.name: version for model in served.ready}
        held = {key.name: self.versions.held[key] for key in keys if key in self.versions.held}
        for like, others in served.standby.items():
            for model in others:
                version = self._version(model, served)
                version.like = made.get(like) or held[like]
                made[version.key.name] = version
        return list(made.values())

    def _version(self, model: Model, served: ServedModels) -> Version:
        settings = self.settings
        metrics = ModelMetrics(self.tier, model.name, model.sha256)
        metrics.show_queue(partial(self._queued_images, model.name))
        runner = ModelRunner(
            model,
            max_batch_size=settings.batch_images,
            max_queue_delay_s=settings.max_queue_delay_s,
            max_queue_images=settings.max_queue_images,
            thread=self._thread,
            observe=metrics.observe_batch,
            trouble=self._trouble,
            elsewhere=served.engine is not None,
        )
        return Version(runner, metrics, served.guards.get(model.name))

    async def _run(self, version: Version, warm_up_s: float | None = None) -> None:
        """Run a version, and measure its speed. One on standby is offered with the speed of its equal."""
        runner, name = version.runner, version.key.name
        await runner.__aenter__()
        if version.like is None:
            await (runner.warm_up() if warm_up_s is None else runner.warm_up(warm_up_s))
            known = {key: value for key, value in runner.model.parameters.items() if key.endswith("_accuracy")}
            pace = {"ms_per_image": round(runner.ms_per_image, 3)}
            log.info("model ready", extra={"model": name, **pace, **known})
        like = version.like or version
        ms_per_image = like.runner.ms_per_image * self._replicas if like.offer is None else like.offer.ms_per_image
        version.offer = ModelOffer(
            name=name,
            sha256=version.key.sha256,
            ms_per_image=ms_per_image,
            classes=_classes(runner.model),
            reading=version.key.reading,
        )

    def _make_offers(self, keys: Sequence[ModelKey]) -> None:
        offers = (self.versions.held[key].offer for key in dict.fromkeys(keys))
        self._offers = tuple(offer for offer in offers if offer is not None)

    def _forget_metrics(self, version: Version) -> None:
        same = [key for key in self.versions.held if key.name == version.key.name]
        version.metrics.close(last=not same, last_of_sha256=all(key.sha256 != version.key.sha256 for key in same))

    def _add_check(self, name: str) -> None:
        self.lifecycle.add_check(f"model {name}", partial(self._check_model, name))

    async def _check_model(self, name: str) -> None:
        for version in self.versions.named(name):
            if version.like is None:
                await version.runner.check()
            else:
                version.runner.check_served()

    def _queued_images(self, name: str) -> int:
        return sum(version.runner.queued_images for key, version in self.versions.held.items() if key.name == name)

    def _counted(self) -> list[ModelRunner | Gone]:
        return [*(version.runner for version in self.versions.held.values()), self.versions.gone]

    # --- within the node ---

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The models answer, and the scheduler knows of it, within this context."""
        settings = self.settings
        async with AsyncExitStack() as stack:
            stack.callback(self.files.close)
            client = open_client(tls_ca=settings.tls_ca, middlewares=self._substitutes.middlewares, meter=self.meter)
            self.http = await stack.enter_async_context(client)
            if self._engine is not None:
                await stack.enter_async_context(self._engine.running(self.lifecycle))
            stack.push_async_callback(self._stop)
            for version in self.versions:
                await self._run(version)
                self._add_check(version.key.name)
            if self.encoders is not None:
                await stack.enter_async_context(self.encoders.running(self._thread, self.files))
            self._make_offers([version.key for version in self.versions])
            senders = self._senders = [self._sender(each) for each in self._schedulers]
            if senders:
                self.scheduler, *others = senders
                self.lifecycle.add_check("scheduler", self.scheduler.check_refusal)
                for each, sender in zip(self._schedulers[1:], others, strict=True):
                    self.lifecycle.add_note(f"scheduler {each.name}", sender.check_refusal)
                await stack.enter_async_context(_all_of(senders))
            if self.holding is not None:
                self.holding.on_trouble = senders[0].hurry
                following = self.lifecycle.own(self.holding.run(), name="releases")
                stack.push_async_callback(_ended, following)
            if self._share_metrics is not None:
                stack.enter_context(self._share_metrics.shown())
            yield

    async def _stop(self) -> None:
        for version in self.versions.held.values():
            await version.runner.__aexit__(None, None, None)

    def _sender(self, scheduler: ScheduledBy) -> HeartbeatSender:
        """The connection to one scheduler, which sees its own share of the node."""
        first, several = scheduler is self._schedulers[0], len(self._schedulers) > 1
        key = self.lifecycle.keys.get(scheduler.name, "")

        def registration(url: str) -> Registration:
            more = {} if first else {"follows": False}
            return self.registration(url).model_copy(update={"key": key, **more})

        def heartbeat() -> Heartbeat:
            queued = sum(each.runner.queued_images_of(scheduler.name) for each in self.versions.held.values())
            more = {} if first else {"troubles": ()}
            return self.heartbeat().model_copy(update={"queued_images": queued, **more})

        return HeartbeatSender(
            scheduler.urls,
            registration if several else self.registration,
            heartbeat if several else self.heartbeat,
            self.http,
            lifecycle=self.lifecycle,
            token=scheduler.token,
            heard=self.heard if first else lambda _: None,
            name=scheduler.name if several else "",
            gives_networks=first,
        )

    @property
    def shares(self) -> Mapping[bytes, str]:
        """The share of a request by its header `Authorization`, on a node with several schedulers."""
        if len(self._schedulers) < 2:
            return {}
        return {f"Bearer {key}".encode(): name for name, key in self.lifecycle.keys.items()}

    def heartbeat(self) -> Heartbeat:
        """Return the present load of the node."""
        runners = [version.runner for version in self.versions.held.values()]
        return Heartbeat(
            incarnation=self.incarnation,
            in_flight=self.lifecycle.in_flight,
            queued_images=sum(runner.queued_images for runner in runners),
            running_images=sum(runner.running_images for runner in runners),
            images_done=sum(runner.images_computed for runner in runners) + self.versions.gone.images_computed,
            draining=self.lifecycle.draining or not self.repository.whole,
            replicas=self._replicas,
            troubles=() if self.holding is None else self.holding.troubles,
        )

    @property
    def _replicas(self) -> int:
        return 1 if self._engine is None else max(1, self._engine.replicas)

    def _trouble(self) -> str:
        return "" if self._engine is None else self._engine.trouble

    def registration(self, scheduler: str) -> Registration:
        """Return the offer of the running node to the scheduler at this URL, with the node's own address.

        Raises:
            UpstreamUnavailable: its own address is not known yet, because no route leads to the scheduler.
        """
        url = self.settings.advertise_url or reachable_url(self.lifecycle.url, peer=scheduler)
        return Registration(
            node_id=self.settings.node_id,
            incarnation=self.incarnation,
            tier=self.tier,
            url=url,
            site=self.settings.site,
            models=self._offers,
            follows=self.holding is not None,
            encoders=() if self.encoders is None else self.encoders.offers,
            version=self.version,
            images_per_minute=self.settings.images_per_minute,
            allowed_upstreams=self.allowed_upstreams,
            key=self.lifecycle.key,
        )


@asynccontextmanager
async def _all_of(senders: Sequence[HeartbeatSender]) -> AsyncIterator[None]:
    """All of them send within this context, and leave at the same time: none waits for a scheduler that is away."""
    async with AsyncExitStack() as started:
        for sender in senders:
            await started.enter_async_context(sender)
        started.pop_all()
        try:
            yield
        finally:
            await asyncio.gather(*(sender.__aexit__(None, None, None) for sender in senders))


def _cores(models: Sequence[Model]) -> int:
    return max((model.threads for model in models if isinstance(model, Divisible)), default=1)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _classes(model: Model) -> str:
    names = model.labels.get("probabilities") or model.labels.get("logits")
    return classes_digest(names) if names else ""


def node_app(
    node: InferenceNode, routes: Sequence[BaseRoute] = (), direct: Mapping[str, Direct] | None = None
) -> Starlette:
    """Return the node's HTTP application: the Open Inference Protocol for its models, and further `routes`.

    Args:
        direct: the most frequent of `routes`; see `answer_directly`.
    """

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with node.running():
            yield

    limits = Limits(max_body_bytes=node.settings.max_body_bytes)
    span = "end" if node.tier is Tier.END else "upstream"
    infer = InferEndpoint(node.versions, limits, node.files, span=span, shares=node.shares)
    oip = oip_routes(
        node.versions,
        infer,
        node.repository,
        ready=lambda: node.lifecycle.ready and not node.lifecycle.draining,
        version=node.version,
        server_name=f"terrace-{node.tier}",
    )
    copies = [] if node.copies is None else [node.copies.route()]
    app = Starlette(routes=[*routes, *copies, *oip], lifespan=lifespan)
    install(app)
    # One layer instead of the framework's three: `Answering` handles what they would.
    app.middleware_stack = Answering(app.router)
    paths: dict[str, Direct] = {}

    def show_paths() -> None:
        paths.clear()
        for name, version in node.versions.paths:
            if version is None:
                paths[f"/v2/models/{name}/infer"] = Direct(infer, {"model": name})
            else:
                path = f"/v2/models/{name}/versions/{version}/infer"
                paths[path] = Direct(infer, {"model": name, "version": version})
        paths.update(direct or {})

    show_paths()
    node.versions.changed = show_paths
    answer_directly(app, paths)
    return app
