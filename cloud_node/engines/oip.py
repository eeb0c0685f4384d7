"""The engine `oip`: a server of the Open Inference Protocol computes the networks.

The server's metadata of a network is compared with the manifest once, at the start, and again whenever the server comes
back: names and datatypes are mapped, shapes must agree. Labels and temperature come from the manifest.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import numpy as np

from cloud_node.engines.kind import EngineKind
from cloud_node.engines.model import EngineModel
from cloud_node.settings import CloudSettings
from encryption.features import Features, features_tensor, unpack
from encryption.loading import load_served
from encryption.serving import NetworkPart
from models.manifest import EncoderEntry, Manifest, ModelEntry
from models.serving import decode_of
from models.session import entry_of
from models.source import chosen_entries
from models.split import FEATURES
from tierkit.access import TokenFile
from tierkit.errors import (
    DeadlineExceeded,
    InvalidAnswer,
    SetupError,
    TerraceError,
    Unavailable,
    UpstreamError,
)
from tierkit.http.address import leads_to
from tierkit.http.client import open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.model import wanted_s
from tierkit.inference.oip_client import InferOptions, ModelMetadata, OipClient, TensorMetadata
from tierkit.inference.served import ServedModels, show_engine
from tierkit.pacing import backoff_s
from tierkit.tensors import Array, TensorSpec
from tierkit.types import Tier
from tierkit.wire.oip import InferRequest, Limits, RequestedOutput, Tensor
from tierkit.wire.oip.datatypes import dtype_of

__all__ = ["ENGINE", "Match", "OipEngine", "Wanted", "logits_in", "match"]

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two looks at whether the server is ready."""
_LOOK_BUDGET_S = 5.0
_BATCHES = 4
"""Batches that a server may have to compute before it answers a look: two pieces of this node, and pieces of other
nodes."""
_BATCH_BUDGET_S = 30.0
"""Seconds after which a batch counts as hanging."""
_JSON_BYTES = 4 * 1024**2
"""Most bytes of a JSON answer, from a server that knows no binary tensors: 64 images of about a thousand classes."""
_PROOF_IMAGES = 50
_PIECES = 2
"""Pieces of one batch that an upstream has at a time: it computes one while the other is under way."""

_REFUSES = (400, 413, 415, 422)
"""Statuses that say that a batch will never do."""
_ABSENT = (400, 404)
"""Statuses with which servers say that they have no such model; Triton takes the first."""
_HOLDS = {
    "UINT8": ("UINT8", "UINT16", "UINT32", "UINT64", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"),
    "FP32": ("FP32", "FP64"),
}
"""Datatypes that hold each value of this one exactly, by datatype; the same one first."""
_NUMBERS = ("FP32", "FP64", "FP16")
_SUM_TOLERANCE = 0.01


class _Oip(EngineKind):
    reads = ("upstream", "upstream_model", "upstream_token_file")

    def check(self, settings: CloudSettings) -> None:
        if settings.upstream is None:
            raise ValueError("the engine oip needs the setting upstream: --upstream http://HOST:PORT of the server")

    def batch_images(self, settings: CloudSettings) -> int:
        return settings.max_batch_size * _PIECES

    async def load(self, settings: CloudSettings, manifest: Manifest, lifecycle: Lifecycle) -> ServedModels:
        """The networks of the node, computed by the server at `settings.upstream`. Waits until that is there.

        Raises:
            SetupError: it serves other networks than these, or refuses this node, or is this node.
        """
        engine = OipEngine(settings, manifest)
        if await asyncio.to_thread(leads_to, engine.url, lifecycle.url):
            raise SetupError(f"the upstream {engine.url} is this node itself: --upstream says where another server is")
        show_engine(engine, lifecycle)
        async with engine.connected():
            served = await load_served(settings, Tier.CLOUD, manifest, engine)
        return replace(served, engine=engine)


ENGINE = _Oip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A network, or the tail of one, as the manifest knows it."""

    name: str
    """Name on the server."""
    network: str
    """Name in the manifest."""
    takes: TensorSpec
    classes: int
    sha256: str
    encoder: EncoderEntry | None = None
    """Encoder whose tail it is; None for a whole network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Names and datatypes of the server for a network."""

    wanted: Wanted
    input: str
    datatype: str
    output: str
    gives: str | None
    """Meaning of the output: "logits" or "probabilities"; None if its name does not show it."""
    sealed: bool = False
    """True if features go with what says whose they are: to the node of another fleet member."""
    platform: str = ""
    proof_s: float = 0.0
    """Seconds of a batch when the server was last compared with the manifest."""


def match(said: ModelMetadata, wanted: Wanted) -> Match:
    """Compare a server's metadata of a network with the manifest.

    Raises:
        SetupError: they do not fit; the message names both.
    """
    takes, name = wanted.takes, wanted.name
    about = said.parameters or {}
    digest = about.get("sha256")
    if isinstance(digest, str) and digest != wanted.sha256:
        raise SetupError(
            f"'{name}' on the upstream is not the network '{wanted.network}' of this node's model set: its sha256 is "
            f"{digest[:64]}, but '{wanted.network}' has {wanted.sha256}; "
            + (
                "give both nodes the same model set"
                if name == wanted.network
                else f"--upstream-model sets the name of '{wanted.network}' there"
            )
        )
    sealed = wanted.encoder is not None and "encoder" in about
    datatypes = _HOLDS[takes.datatype]
    inputs = said.inputs or ()
    fits = [
        each
        for each in inputs
        if _shaped(each, takes.shape) and (each.datatype in datatypes or (sealed and each.datatype == "UINT8"))
    ]
    if len(inputs) != 1 or not fits:
        raise SetupError(
            f"'{name}' on the upstream takes {_in_words(inputs)}; this node has one input, "
            f"{takes.datatype} {list(takes.shape)}, and can send it as {' or '.join(datatypes)}"
        )
    shape = (-1, wanted.classes)
    outputs = {each.name: each for each in said.outputs or () if _shaped(each, shape) and each.datatype in _NUMBERS}
    known = [each for each in ("logits", "probabilities") if each in outputs]
    if not known and len(outputs) != 1:
        raise SetupError(
            f"'{name}' on the upstream gives {_in_words(said.outputs or ())}; this node needs logits or probabilities, "
            f"{' or '.join(_NUMBERS)} {list(shape)}: one output of this shape, or one of these names"
        )
    return Match(
        wanted=wanted,
        input=fits[0].name,
        datatype="FP32" if sealed else fits[0].datatype,
        output=known[0] if known else next(iter(outputs)),
        gives=known[0] if known else None,
        sealed=sealed,
        platform=said.platform or "",
    )


def logits_in(answer: Array, gives: str | None) -> Array:
    """Return FP32 logits from a server's answer, `[n, classes]`. For probabilities, these are their logarithms, from
    which softmax makes the same probabilities.

    Args:
        gives: "logits" or "probabilities".

    Raises:
        InvalidAnswer: the answer's probabilities are invalid.
    """
    values = np.asarray(answer, np.float32)
    if gives != "probabilities":
        return values
    if not are_probabilities(values):
        raise InvalidAnswer("what the upstream gives as probabilities does not add up to 1")
    return np.log(np.maximum(values, np.finfo(np.float32).tiny))


def are_probabilities(values: Array) -> bool:
    """True if each row is a distribution."""
    return bool(
        values.ndim == 2
        and np.isfinite(values).all()
        and (values >= -_SUM_TOLERANCE).all()
        and (np.abs(values.sum(axis=1, dtype=np.float64) - 1) <= _SUM_TOLERANCE).all()
    )


class OipEngine:
    """Implements `tierkit.inference.served.Engine` and `encryption.loading.Loader`.

    Args:
        settings: say where the server is, and what the network is called there.
        manifest: what the networks are.

    Raises:
        SetupError: the file with the token cannot be used; or one name for several networks.
    """

    name = "upstream"
    replicas = 1

    def __init__(self, settings: CloudSettings, manifest: Manifest) -> None:
        assert settings.upstream is not None  # `CloudSettings` sees to that
        self.url = settings.upstream
        """URL of the server."""
        self.trouble = f"waiting for the upstream {self.url}"
        """See `tierkit.inference.served.Engine`."""
        self._settings = settings
        self._manifest = manifest
        token_file = settings.upstream_token_file
        self._token: Callable[[], str] = str if token_file is None else TokenFile(token_file)
        if settings.upstream_model and len(chosen_entries(manifest, settings.model, Tier.CLOUD)) > 1:
            raise SetupError("--upstream-model names one network, and this node serves several")
        self._matches: dict[str, Match] = {}
        self._binary = True
        self._failing = ""
        """Kind of the failures that were last logged; "" while batches are answered."""
        self._answered = True
        """True if the last batch was."""
        self._doubt = asyncio.Event()

    # --- at the start ---

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """The server can be asked within this context."""
        async with open_client(tls_ca=self._settings.tls_ca) as http:
            self._http: aiohttp.ClientSession = http
            yield

    async def network(self, entry: ModelEntry) -> EngineModel:
        """See `encryption.loading.Loader`. Waits until the server has it: some listen before they have loaded it.

        Raises:
            SetupError: it is another one, or the server refuses this node.
        """
        labels = self._manifest.labels(entry)
        shape = (-1, *entry.input_shape)
        takes = TensorSpec(name="images", datatype="UINT8", shape=shape, decode=decode_of(self._manifest, entry))
        there = self._settings.upstream_model or entry.name
        wanted = Wanted(name=there, network=entry.name, takes=takes, classes=len(labels), sha256=entry.sha256)

        async def meet() -> bool:
            if not await self._meet(entry.name, wanted):
                raise UpstreamError(f"{self.url} has no model '{there}'; --upstream-model says its name there")
            return True

        if entry.name not in self._matches:
            await self._patiently(meet)
        return self._model(entry, takes, labels)

    async def tail(self, encoder: EncoderEntry) -> Callable[[], NetworkPart] | None:
        """See `encryption.loading.Loader`. For its errors, see `network`."""
        # A server of Terrace would undo once more what this node has undone.
        if encoder.hiding is not None:
            return None
        network = self._manifest.entry(encoder.network)
        labels = self._manifest.labels(network)
        if not self._settings.only_features:
            await self.network(network)  # a server that has not loaded that may have the tail later
        takes = TensorSpec(name=FEATURES, datatype="FP32", shape=(-1, *encoder.feature_shape))
        wanted = Wanted(
            name=encoder.name,
            network=encoder.name,
            takes=takes,
            classes=len(labels),
            sha256=encoder.tail.sha256,
            encoder=encoder,
        )
        if not await self._patiently(lambda: self._meet(encoder.name, wanted)):
            return None
        model = self._model(entry_of(encoder, network, "tail"), takes, labels)
        return lambda: model

    def _model(self, entry: ModelEntry, takes: TensorSpec, labels: Sequence[str]) -> EngineModel:
        return EngineModel(
            entry,
            takes,
            labels,
            platform=self._matches[entry.name].platform or "open_inference_protocol",
            engine=self,
            most_images=self._settings.max_batch_size,
        )

    async def _patiently(self, meet: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Return the result of `meet`, which is tried again until the server answers."""
        failures, said = 0, ""
        while True:
            try:
                met = await meet()
            except (Unavailable, DeadlineExceeded, UpstreamError) as exc:
                failures += 1
                if str(exc) != said:
                    said = str(exc)
                    self.trouble = f"waiting for the upstream: {said}"
                    log.warning("the upstream is not ready yet, trying on: %s", said)
            else:
                self.trouble = ""
                return met
            await asyncio.sleep(backoff_s(failures, first_s=0.2, cap_s=5.0, chance=random.random()))

    async def _meet(self, name: str, wanted: Wanted) -> bool:
        """Compare a network with the server's metadata, and have the server compute a batch; False if it does not have
        the network.

        Raises:
            SetupError: they do not fit, or the server refuses this node, or the batch.
        """
        client, token = self._client(), self._token()
        try:
            try:
                self._binary = await client.speaks_binary(self.url, budget_s=_LOOK_BUDGET_S, token=token)
            except UpstreamError as exc:
                if exc.status_code != 404:
                    raise
                raise UpstreamError(f"{self.url}/v2 is not a server of the Open Inference Protocol: {exc}") from exc
            said = await client.metadata(self.url, wanted.name, budget_s=_LOOK_BUDGET_S, token=token)
            await client.check_ready(self.url, wanted.name, budget_s=_LOOK_BUDGET_S, token=token)
        except UpstreamError as exc:
            _check_admitted(exc)
            if exc.status_code in _ABSENT:
                return False
            raise
        found = match(said, wanted)
        blank = _blank(wanted, min(_PROOF_IMAGES, self._settings.max_batch_size))
        began = time.monotonic()
        try:
            answer = await self._answer(found, blank, _BATCH_BUDGET_S)
        except UpstreamError as exc:
            _check_admitted(exc)
            if exc.status_code in _REFUSES:
                raise SetupError(f"the upstream refuses {len(blank)} images (see --max-batch-size): {exc}") from exc
            raise
        found = replace(found, proof_s=time.monotonic() - began)
        if found.gives is None:
            found = replace(found, gives="probabilities" if are_probabilities(answer) else "logits")
        self._matches[name] = found
        return True

    # --- while the node runs ---

    @asynccontextmanager
    async def running(self, lifecycle: Lifecycle) -> AsyncIterator[None]:
        """See `tierkit.inference.served.Engine`."""
        self._loop = asyncio.get_running_loop()
        async with self.connected():
            watch = lifecycle.own(self._watch(), name="upstream")
            try:
                yield
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    def compute(self, model: str, pieces: Sequence[Array]) -> Sequence[Array]:
        """See `cloud_node.engines.model.Computes`."""
        computing = self._compute(self._matches[model], pieces, wanted_s(_BATCH_BUDGET_S))
        return asyncio.run_coroutine_threadsafe(computing, self._loop).result()

    async def _compute(self, found: Match, pieces: Sequence[Array], budget_s: float) -> list[Array]:
        asked = [asyncio.ensure_future(self._answer(found, piece, budget_s)) for piece in pieces]
        try:
            answers = [logits_in(answer, found.gives) for answer in await asyncio.gather(*asked)]
        except TerraceError as exc:
            self._answered = False
            self._doubt.set()
            kind = f"{type(exc).__name__} {getattr(exc, 'status_code', '')}"
            if kind != self._failing:  # each of its failures has words of its own
                self._failing = kind
                log.warning("the upstream fails to compute batches: %s", exc)
            raise
        finally:
            for each in asked:
                each.cancel()
        self._answered = True
        return answers

    async def _answer(self, found: Match, values: Array, budget_s: float) -> Array:
        """Return the server's answer for some images, unchanged, within `budget_s`."""
        if found.sealed and found.wanted.encoder is not None:
            tensor = await features_tensor(Features(encoder=found.wanted.encoder, values=values))
        else:
            tensor = Tensor(found.input, values.astype(dtype_of(found.datatype), copy=False))
        request = InferRequest(inputs=(tensor,), outputs=(RequestedOutput(found.output),), binary_output=self._binary)
        response = await self._client().infer(
            self.url,
            found.wanted.name,
            request,
            InferOptions(budget_s=budget_s, token=self._token(), binary=self._binary),
        )
        answer = response.output(found.output)
        if answer is None or answer.shape != (len(values), found.wanted.classes) or answer.dtype.kind != "f":
            raise InvalidAnswer(f"{self.url} answers with no {found.wanted.classes} numbers for each image")
        return answer

    def _client(self) -> OipClient:
        return OipClient(self._http, limits=Limits(max_json_bytes=_JSON_BYTES))

    async def _watch(self) -> None:
        """Look at the server now and then, and at once where a request has failed."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._doubt.wait()
            except TimeoutError:
                if self._failing and self._answered:
                    self._failing = ""
                    log.info("the upstream computes batches again")
            self._doubt.clear()
            await self._look()

    async def _look(self) -> None:
        try:
            if self.trouble:
                # It may be another one that has taken its place.
                for name, found in list(self._matches.items()):
                    if not await self._meet(name, found.wanted):
                        raise UpstreamError(f"{self.url} has no model '{found.wanted.name}' any more")
            # A server that computes on its event loop says nothing meanwhile.
            budget_s = max(_LOOK_BUDGET_S, *(_BATCHES * found.proof_s for found in self._matches.values()))
            for found in self._matches.values():
                await self._client().check_ready(self.url, found.wanted.name, budget_s=budget_s, token=self._token())
        except TerraceError as exc:
            self._tell(str(exc))
        else:
            self._tell("")

    def _tell(self, trouble: str) -> None:
        if trouble and not self.trouble:
            log.warning("the upstream is not ready, so this node takes no tasks: %s", trouble)
        if self.trouble and not trouble:
            log.info("the upstream is ready again")
        self.trouble = trouble and f"the upstream is not ready: {trouble}"


def _check_admitted(error: UpstreamError) -> None:
    """Raise SetupError if the server refused this node's token, or asks for one."""
    if error.status_code in (401, 403):
        raise SetupError(f"the upstream does not admit this node: {error}; see --upstream-token-file") from error


def _shaped(tensor: TensorMetadata, shape: Sequence[int]) -> bool:
    """True if a server's tensor takes any batch of this shape; -1 is its word for a length that it leaves open."""
    there = tensor.shape
    return (
        len(there) == len(shape)
        and there[0] == -1
        and all(have in (-1, want) for have, want in zip(there[1:], shape[1:], strict=True))
    )


def _in_words(tensors: Sequence[TensorMetadata]) -> str:
    said = ", ".join(f"'{each.name}' {each.datatype} {list(each.shape)}" for each in tensors[:8])
    return said[:500] or "nothing that it tells"


def _blank(wanted: Wanted, images: int) -> Array:
    values = np.zeros((images, *wanted.takes.shape[1:]), np.uint8)
    return values if wanted.encoder is None else unpack(wanted.encoder, values)
