"""The engine `ray`: replicas on a Ray cluster compute the networks, as many as the load asks for.

The node deploys them with Ray Serve in a separate application, calls them through its handle, and takes them down when
it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import anyio

from cloud_node.engines.kind import EngineKind
from cloud_node.engines.model import EngineModel
from cloud_node.engines.replica import Content, Replica
from cloud_node.settings import CloudSettings
from encryption.loading import load_served
from encryption.serving import NetworkPart
from models.manifest import EncoderEntry, Manifest, ModelEntry, WeightsFile
from models.serving import decode_of, obtain_weights, open_store
from models.session import entry_of, verify_file
from models.split import FEATURES, Part, extract_part
from tierkit.errors import (
    ClusterUnavailable,
    Draining,
    MissingExtra,
    SetupError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.model import wanted_s
from tierkit.inference.served import ServedModels, show_engine
from tierkit.tensors import Array, TensorSpec
from tierkit.types import Tier

__all__ = ["ENGINE", "RayEngine"]

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two looks at the number of running replicas."""
_BATCH_BUDGET_S = 30.0
"""Seconds after which a batch counts as hanging."""
_AGAIN_S = 0.05
"""Seconds before a piece goes to another replica: the cluster has to notice that the first one died."""
_HEALTH_PERIOD_S = 1.0
"""Seconds between two looks of the cluster at a replica. A dead one is replaced after the next look: with Ray's own 10
s a node with one replica would be without any for as long."""
_CONNECT_S = 3.0
_DEPLOY_S = 60.0
_LOOK_BUDGET_S = 10.0
_LEAVE_S = 10.0
_PIECES_AT_A_TIME = 2
"""Pieces that a replica takes at a time: it computes one while the other is under way."""

_DEPLOYMENT = "networks"

T = TypeVar("T")


class _Ray(EngineKind):
    reads = ("address", "replicas", "gpus")

    def batch_images(self, settings: CloudSettings) -> int:
        return settings.max_batch_size * settings.replica_cores * settings.replica_range[1]

    async def load(self, settings: CloudSettings, manifest: Manifest, lifecycle: Lifecycle) -> ServedModels:
        """Return the networks of the node, computed by replicas on the cluster at `settings.address`.

        Raises:
            MissingExtra: Ray is not installed.
            SetupError: see `encryption.loading.load_served`.
        """
        import_serve()
        engine = RayEngine(settings, manifest)
        show_engine(engine, lifecycle)
        return replace(await load_served(settings, Tier.CLOUD, manifest, engine), engine=engine)


ENGINE = _Ray()


def import_serve() -> tuple[Any, Any]:
    """Ray, and its Serve.

    Raises:
        MissingExtra: it is not installed.
    """
    # It would tell its makers of each cluster that it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as exc:
        raise MissingExtra("ray", "the engine ray") from exc
    return ray, serve


class RayEngine:
    """Implements `tierkit.inference.served.Engine` and `encryption.loading.Loader`.

    Args:
        settings: give the address of the cluster, and the number and size of the replicas.
        manifest: what the networks are.
    """

    name = "ray"

    def __init__(self, settings: CloudSettings, manifest: Manifest) -> None:
        self.trouble = "the replicas have not been started"
        """See `tierkit.inference.served.Engine`."""
        self.replicas = 0
        """Number of replicas that run now."""
        self._settings = settings
        self._manifest = manifest
        self._contents: dict[str, Content] = {}
        self._application = f"terrace-{settings.node_id}"
        self._handle: Any = None
        self._left = threading.Event()
        """The node needs the cluster no longer."""

    # --- at the start ---

    async def network(self, entry: ModelEntry) -> EngineModel:
        """See `encryption.loading.Loader`. For its SetupError, see `models.serving.obtain_weights`."""
        takes = TensorSpec(
            name="images", datatype="UINT8", shape=(-1, *entry.input_shape), decode=decode_of(self._manifest, entry)
        )
        return await self._model(entry, entry, "whole", takes, at_once=True)

    async def tail(self, encoder: EncoderEntry) -> Callable[[], NetworkPart]:
        """See `encryption.loading.Loader`. For its SetupError, see `models.serving.obtain_weights`."""
        network = self._manifest.entry(encoder.network)
        entry = entry_of(encoder, network, "tail")
        takes = TensorSpec(name=FEATURES, datatype="FP32", shape=(-1, *encoder.feature_shape))
        model = await self._model(
            entry, encoder.weights("tail"), encoder.tail.part, takes, at_once=self._settings.only_features
        )
        return lambda: model

    async def _model(
        self, entry: ModelEntry, weights: WeightsFile, part: Part, takes: TensorSpec, *, at_once: bool
    ) -> EngineModel:
        """Args:
        part: of the file.
        """
        settings = self._settings
        path = await obtain_weights(open_store(settings), weights, settings)
        await anyio.to_thread.run_sync(verify_file, weights, path.parent)
        content = await anyio.Path(path).read_bytes()
        self._contents[entry.name] = Content(
            entry=entry,
            part="whole" if takes.name == "images" else "tail",
            takes=takes.name,
            network=extract_part(content, part),
            at_once=at_once,
            provider="cuda" if settings.gpus else settings.provider,
            threads=settings.replica_cores,
        )
        return EngineModel(
            entry,
            takes,
            self._manifest.labels(entry),
            platform="ray_serve",
            engine=self,
            most_images=settings.max_batch_size * settings.replica_cores,
        )

    # --- while the node runs ---

    @asynccontextmanager
    async def running(self, lifecycle: Lifecycle) -> AsyncIterator[None]:
        """See `tierkit.inference.served.Engine`.

        Raises:
            ClusterUnavailable: no cluster answers at the address.
            SetupError: the replicas cannot be started on it.
        """
        ray, serve = import_serve()
        try:
            await self._reach()
            try:
                await _apart(lambda: self._deploy(ray, serve), _DEPLOY_S, stay=self._left)
            except TimeoutError as exc:
                raise ClusterUnavailable(
                    f"the cluster at {self._settings.address} does not answer; see --address"
                ) from exc
            _take_signals_back()
            await self._started()
            watch = lifecycle.own(self._watch(), name="replicas")
            try:
                yield
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        finally:
            with contextlib.suppress(TimeoutError):
                await _apart(lambda: self._leave(ray, serve), _LEAVE_S)
            self._left.set()

    async def _reach(self) -> None:
        """Check that an address with a port accepts connections: Ray would try for minutes."""
        host, _, port = self._settings.address.rpartition(":")
        if not (host and port.isdigit()):
            return
        try:
            async with asyncio.timeout(_CONNECT_S):
                _reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, ValueError, OverflowError) as exc:
            error = ClusterUnavailable if isinstance(exc, OSError) else SetupError  # else it is no address
            raise error(f"no cluster listens at {self._settings.address}: {_short(exc)}; see --address") from exc
        writer.close()

    def _deploy(self, ray: Any, serve: Any) -> None:
        settings = self._settings
        alone = {"include_dashboard": False} if settings.address == "local" else {}
        try:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            ray.init(address=settings.address, logging_level=logging.ERROR, log_to_driver=False, **alone)
            # Nobody asks the replicas over HTTP.
            serve.start(proxy_location="Disabled")
            least, most = settings.replica_range
            scaling: dict[str, Any] = {"num_replicas": most}
            if least < most:
                bounds = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": 1}
                scaling = {"autoscaling_config": bounds}
            deployment = serve.deployment(Replica).options(
                name=_DEPLOYMENT,
                ray_actor_options={"num_cpus": settings.replica_cores, "num_gpus": settings.gpus},
                max_ongoing_requests=_PIECES_AT_A_TIME,
                health_check_period_s=_HEALTH_PERIOD_S,
                **scaling,
            )
            target = serve.RunTarget(
                deployment.bind([ray.put(self._contents)]), name=self._application, route_prefix=None
            )
            (self._handle,) = serve.run_many([target], wait_for_applications_running=False)
        except ConnectionError as exc:
            raise ClusterUnavailable(f"no cluster at {settings.address}: {_short(exc)}; see --address") from exc
        except (ray.exceptions.RayError, RuntimeError, ValueError) as exc:
            raise SetupError(f"the cluster at {settings.address} cannot be used: {_short(exc)}; see --address") from exc

    async def _started(self) -> None:
        """Return when the first replica runs."""
        told = False
        while True:
            failed = await self._look()
            if not self.trouble:
                return
            if failed:
                raise SetupError(f"no replica can be started: {failed}")
            if not told:
                log.info("the cluster starts the replicas", extra={"replicas": self._settings.replicas})
                told = True
            await asyncio.sleep(_LOOK_S)

    def _leave(self, ray: Any, serve: Any) -> None:
        if ray.is_initialized():
            with contextlib.suppress(*_troubles(ray)):
                serve.delete(self._application)
            ray.shutdown()

    def compute(self, model: str, pieces: Sequence[Array]) -> Sequence[Array]:
        """See `cloud_node.engines.model.Computes`. A piece whose replica dies goes to another."""
        asked = [self._handle.compute.remote(model, piece) for piece in pieces]
        began = time.monotonic()
        budget_s = wanted_s(_BATCH_BUDGET_S)
        return [self._answer(model, *each, began, budget_s) for each in zip(pieces, asked, strict=True)]

    def _answer(self, model: str, piece: Array, asked: Any, began: float, budget_s: float) -> Array:
        from ray import exceptions
        from ray.serve.exceptions import RayServeException

        while True:
            try:
                answer: Array = asked.result(timeout_s=max(0.0, began + budget_s - time.monotonic()))
            except exceptions.RayActorError as exc:
                log.warning("a replica died, its images go to another one: %s", _short(exc))
                if self._left.wait(_AGAIN_S):
                    raise Draining("the node is shutting down") from exc
                asked = self._handle.compute.remote(model, piece)
            except TimeoutError as exc:
                raise UpstreamTimeout(f"no replica has answered within {budget_s:.3g} s") from exc
            except RayServeException as exc:
                raise UpstreamUnavailable(f"no replica takes the images: {_short(exc)}") from exc
            except exceptions.RayError as exc:
                raise UpstreamError(f"a replica cannot compute the images: {_short(exc)}") from exc
            else:
                return answer

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look()

    async def _look(self) -> str:
        """Count the replicas that run; why none ever will, where that is so."""
        try:
            status = await _apart(self._status, _LOOK_BUDGET_S)
        except (UpstreamUnavailable, TimeoutError) as exc:
            self._tell(0, str(exc) or "the cluster does not answer")
            return ""
        deployed = status.deployments.get(_DEPLOYMENT)
        states = {} if deployed is None else deployed.replica_states
        self._tell(sum(number for state, number in states.items() if state == "RUNNING"), "no replica runs")
        if status.status != "DEPLOY_FAILED":
            return ""
        return _short(status.message if deployed is None else f"{status.message} {deployed.message}")

    def _status(self) -> Any:
        ray, serve = import_serve()
        try:
            return serve.status().applications[self._application]
        except _troubles(ray) as exc:
            raise UpstreamUnavailable(f"the cluster does not answer: {_short(exc)}") from exc

    def _tell(self, running: int, trouble: str) -> None:
        if running != self.replicas:
            log.info("replicas of the networks", extra={"running": running, "before": self.replicas})
        self.replicas = running
        self.trouble = "" if running else trouble


def _troubles(ray: Any) -> tuple[type[Exception], ...]:
    """Errors that Ray's calls raise if the cluster, its Serve or the application is gone."""
    from ray.serve.exceptions import RayServeException

    return (ray.exceptions.RayError, RayServeException, KeyError, OSError, RuntimeError, ValueError)


async def _apart(call: Callable[[], T], budget_s: float, *, stay: threading.Event | None = None) -> T:
    """Return the result of a call of Ray, made on a new thread. Some calls hang when the cluster does, and a thread of
    the pool would keep the process from ending.

    Args:
        stay: the thread stays until this is set. A cluster that `ray.init` has started ends with the thread that
            called it (PR_SET_PDEATHSIG).

    Raises:
        TimeoutError: it takes longer than `budget_s`.
    """
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as exc:  # of any kind: it is raised where the call is awaited
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)
        if stay is not None:
            stay.wait()

    threading.Thread(target=run, name="ray", daemon=True).start()
    async with asyncio.timeout(budget_s):
        answer: T = await done
    return answer


def _take_signals_back() -> None:
    """Ray's own handlers write a stack trace for each of them before they call the service's."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.getsignal(number))


def _short(error: object) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
