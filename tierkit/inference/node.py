"""A tier node: models that are served, measured, watched and offered. End, edge and cloud nodes are made of this."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import aiohttp
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from tierkit.distribution import installed_version
from tierkit.errors import Unavailable
from tierkit.http.address import reachable_url
from tierkit.http.answering import Answering, install
from tierkit.http.client import Meter, open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.shell import Direct, answer_directly
from tierkit.inference.endpoints import Guard, InferEndpoint, oip_routes
from tierkit.inference.files import FileDecoder
from tierkit.inference.heartbeat import HeartbeatSender
from tierkit.inference.metrics import ModelMetrics, ShareMetrics
from tierkit.inference.model import Divisible, Model
from tierkit.inference.repository import Repository
from tierkit.inference.runner import ModelRunner
from tierkit.inference.sharing import ShareTurns
from tierkit.inference.thread import InferenceThread
from tierkit.settings import NodeSettings, ScheduledBy
from tierkit.types import Tier
from tierkit.wire.messages import EncoderOffer, Heartbeat, ModelOffer, Registration, classes_digest
from tierkit.wire.oip import Limits

__all__ = [
    "NO_SUBSTITUTES",
    "Engine",
    "HeldEncoders",
    "InferenceNode",
    "ServedModels",
    "Substitutes",
    "node_app",
    "show_engine",
]

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Engine(Protocol):
    """What computes a node's models outside its process, such as another server."""

    @property
    def name(self) -> str:
        """Of its part in the node's readiness."""
        ...

    @property
    def trouble(self) -> str:
        """Why it computes nothing now; "" where it does. The node takes no tasks meanwhile."""
        ...

    @property
    def replicas(self) -> int:
        """How many copies of the models compute side by side now."""
        ...

    def running(self, lifecycle: Lifecycle) -> AbstractAsyncContextManager[object]:
        """It computes, and says where it cannot, within this context."""
        ...


def show_engine(engine: Engine, lifecycle: Lifecycle) -> None:
    """Let readiness depend on an engine from now on, and say what it waits for while the node starts."""

    async def check() -> None:
        if engine.trouble:
            raise Unavailable(engine.trouble)

    lifecycle.add_check(engine.name, check)


class HeldEncoders(Protocol):
    """What a node runs for itself, to send features instead of pixels."""

    @property
    def offers(self) -> tuple[EncoderOffer, ...]:
        """What it tells the scheduler of them."""
        ...

    def running(self, thread: InferenceThread, files: FileDecoder) -> AbstractAsyncContextManager[object]:
        """They answer within this context."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """The models of a node, loaded by the service: this package knows no way to load any."""

    ready: Sequence[Model]
    """At least one, of distinct names; loaded."""
    standby: Mapping[str, Sequence[Model]] = field(default_factory=dict)
    """Models that load themselves with the first request for them, by the name of the one in `ready` as whose equals in
    speed they are offered."""
    guards: Mapping[str, Guard] = field(default_factory=dict)
    """By model name, for those whose requests are looked at before they are computed."""
    engine: Engine | None = None
    """What computes them; None: the node's own process."""


def _unchanged(it: _T) -> _T:
    return it


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitutes:
    """What is put in the place of a node's own parts, such as models that take as long as those of another machine."""

    served: Callable[[ServedModels], ServedModels] = _unchanged
    head: Callable[[Model], Model] = _unchanged
    """For each head of an encoder that the node holds."""
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = ()
    """That the node's own requests pass."""


NO_SUBSTITUTES = Substitutes()


class InferenceNode:
    """The models of one node process, behind one inference thread.

    Args:
        settings: of the node.
        models: what it serves.
        lifecycle: of the process; readiness will depend on the models.
        encoders: what it runs for itself besides.
        substitutes: for its own parts.
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
        ready, standby = served.ready, served.standby
        self._like = {model.name: like for like, others in standby.items() for model in others}
        self._middlewares = substitutes.middlewares
        self.http: aiohttp.ClientSession
        """For its own requests, while it is running."""
        self.guards = served.guards
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
        everything = [*ready, *(model for others in standby.values() for model in others)]
        self.metrics = {model.name: ModelMetrics(self.tier, model.name, model.sha256) for model in everything}
        self.files = FileDecoder()
        """Decodes what comes as files, while the node is running."""
        self._schedulers = settings.schedulers
        several = len(self._schedulers) > 1
        turns = ShareTurns([each.name for each in self._schedulers] if several else ())
        self._thread = InferenceThread(_cores(everything), turns)
        self.runners = {
            model.name: ModelRunner(
                model,
                max_batch_size=settings.batch_images,
                max_queue_delay_s=settings.max_queue_delay_s,
                max_queue_images=settings.max_queue_images,
                thread=self._thread,
                observe=self.metrics[model.name].observe_batch,
                trouble=self._trouble,
                elsewhere=served.engine is not None,
            )
            for model in everything
        }

        for name, runner in self.runners.items():
            self.metrics[name].show_queue(partial(_queued_images, runner))
        self._share_metrics = ShareMetrics(turns.shares, self.runners.values()) if several else None
        self.repository = Repository(self.runners)

    @property
    def allowed_upstreams(self) -> tuple[str, ...]:
        """URLs below which a node must lie for this one to send images or features there; empty for anywhere."""
        return ()

    @property
    def meter(self) -> Meter | None:
        """Counts the bytes that the node sends and receives with its own requests; None: nobody asks."""
        return None

    def heard(self, headers: Mapping[str, str]) -> None:
        """The scheduler has answered a request."""

    @property
    def default_runner(self) -> ModelRunner:
        """Of the first model: the one that the node serves where a request names none."""
        return next(iter(self.runners.values()))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The models answer, and the scheduler knows of it, within this context."""
        settings = self.settings
        async with AsyncExitStack() as stack:
            stack.callback(self.files.close)
            client = open_client(tls_ca=settings.tls_ca, middlewares=self._middlewares, meter=self.meter)
            self.http = await stack.enter_async_context(client)
            if self._engine is not None:
                await stack.enter_async_context(self._engine.running(self.lifecycle))
            for name, runner in self.runners.items():
                await stack.enter_async_context(runner)
                if name in self._like:
                    self.lifecycle.add_check(f"model {name}", partial(_check_served, runner))
                    continue
                await runner.warm_up()
                known = {key: value for key, value in runner.model.parameters.items() if key.endswith("_accuracy")}
                pace = {"ms_per_image": round(runner.ms_per_image, 3)}
                log.info("model ready", extra={"model": name, **pace, **known})
                self.lifecycle.add_check(f"model {name}", runner.check)
            if self.encoders is not None:
                await stack.enter_async_context(self.encoders.running(self._thread, self.files))
            self._offers = tuple(
                ModelOffer(
                    name=name,
                    sha256=runner.model.sha256,
                    ms_per_image=self.runners[self._like.get(name, name)].ms_per_image * self._replicas,
                    classes=_classes(runner.model),
                    reading=str(runner.model.parameters.get("reading", "")),
                )
                for name, runner in self.runners.items()
            )
            senders = [self._sender(each) for each in self._schedulers]
            if senders:
                self.scheduler, *others = senders
                self.lifecycle.add_check("scheduler", self.scheduler.check_refusal)
                for each, sender in zip(self._schedulers[1:], others, strict=True):
                    self.lifecycle.add_note(f"scheduler {each.name}", sender.check_refusal)
                await stack.enter_async_context(_all_of(senders))
            if self._share_metrics is not None:
                stack.enter_context(self._share_metrics.shown())
            yield

    def _sender(self, scheduler: ScheduledBy) -> HeartbeatSender:
        """The connection to one scheduler, which sees its own share of the node."""
        first, several = scheduler is self._schedulers[0], len(self._schedulers) > 1
        key = self.lifecycle.keys.get(scheduler.name, "")

        def registration(url: str) -> Registration:
            return self.registration(url).model_copy(update={"key": key})

        def heartbeat() -> Heartbeat:
            queued = sum(runner.queued_images_of(scheduler.name) for runner in self.runners.values())
            return self.heartbeat().model_copy(update={"queued_images": queued})

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
        """How busy the node is now."""
        runners = self.runners.values()
        return Heartbeat(
            incarnation=self.incarnation,
            in_flight=self.lifecycle.in_flight,
            queued_images=sum(runner.queued_images for runner in runners),
            running_images=sum(runner.running_images for runner in runners),
            images_done=sum(runner.images_computed for runner in runners),
            draining=self.lifecycle.draining or not self.repository.whole,
            replicas=self._replicas,
        )

    @property
    def _replicas(self) -> int:
        return 1 if self._engine is None else max(1, self._engine.replicas)

    def _trouble(self) -> str:
        return "" if self._engine is None else self._engine.trouble

    def registration(self, scheduler: str) -> Registration:
        """What the node offers to the scheduler at this URL, and where, while it is running.

        Raises:
            UpstreamUnavailable: its own address is not known yet, for no route leads to the scheduler.
        """
        url = self.settings.advertise_url or reachable_url(self.lifecycle.url, peer=scheduler)
        return Registration(
            node_id=self.settings.node_id,
            incarnation=self.incarnation,
            tier=self.tier,
            url=url,
            site=self.settings.site,
            models=self._offers,
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


def _queued_images(runner: ModelRunner) -> int:
    return runner.queued_images


async def _check_served(runner: ModelRunner) -> None:
    runner.check_served()


def _classes(model: Model) -> str:
    names = model.labels.get("probabilities") or model.labels.get("logits")
    return classes_digest(names) if names else ""


def node_app(
    node: InferenceNode, routes: Sequence[BaseRoute] = (), direct: Mapping[str, Direct] | None = None
) -> Starlette:
    """The node's HTTP application: the Open Inference Protocol for its models, and `routes` of its own.

    Args:
        direct: the most frequent of `routes`; see `answer_directly`.
    """

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with node.running():
            yield

    limits = Limits(max_body_bytes=node.settings.max_body_bytes)
    span = "end" if node.tier is Tier.END else "upstream"
    infer = InferEndpoint(node.runners, node.metrics, limits, node.files, node.guards, span=span, shares=node.shares)
    oip = oip_routes(
        node.runners,
        infer,
        node.repository,
        ready=lambda: node.lifecycle.ready and not node.lifecycle.draining,
        version=node.version,
        server_name=f"terrace-{node.tier}",
    )
    app = Starlette(routes=[*routes, *oip], lifespan=lifespan)
    install(app)
    # One layer instead of the framework's three: `Answering` handles what they would.
    app.middleware_stack = Answering(app.router)
    asked = {f"/v2/models/{name}/infer": Direct(infer, {"model": name}) for name in node.runners}
    answer_directly(app, {**asked, **(direct or {})})
    return app
