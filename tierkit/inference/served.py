"""Parts of a node that its service brings: models, encoders, an engine; and substitutes for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import aiohttp

from tierkit.errors import Unavailable
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.copies import NetworkCopies
from tierkit.inference.files import FileDecoder
from tierkit.inference.model import Model
from tierkit.inference.thread import InferenceThread
from tierkit.wire.messages import EncoderOffer
from tierkit.wire.oip import InferRequest

__all__ = [
    "NOTHING_LOADED",
    "NO_SUBSTITUTES",
    "Engine",
    "Guard",
    "HeldEncoders",
    "Loaded",
    "ModelKey",
    "ReleaseParts",
    "ServedModels",
    "Substitutes",
    "show_engine",
]

_T = TypeVar("_T")

Guard = Callable[[InferRequest], Awaitable[None]]
"""Raises a TerraceError if a request that fits the model must not be answered."""


class Engine(Protocol):
    """A program outside the node's process that computes its models, such as another server."""

    @property
    def name(self) -> str:
        """Name of its check in the node's readiness."""
        ...

    @property
    def trouble(self) -> str:
        """Reason why it computes nothing now; "" if it does. The node takes no tasks meanwhile."""
        ...

    @property
    def replicas(self) -> int:
        """Number of copies of the models that compute side by side now."""
        ...

    def running(self, lifecycle: Lifecycle) -> AbstractAsyncContextManager[object]:
        """It computes, and says where it cannot, within this context."""
        ...


def show_engine(engine: Engine, lifecycle: Lifecycle) -> None:
    """Let readiness depend on an engine from now on; while the node starts, its check shows the reason for the wait."""

    async def check() -> None:
        if engine.trouble:
            raise Unavailable(engine.trouble)

    lifecycle.add_check(engine.name, check)


class HeldEncoders(Protocol):
    """Encoders that a node runs for itself, to send features instead of pixels."""

    @property
    def offers(self) -> tuple[EncoderOffer, ...]:
        """Their part of the registration."""
        ...

    def running(self, thread: InferenceThread, files: FileDecoder) -> AbstractAsyncContextManager[object]:
        """They answer within this context."""
        ...

    async def hold(self, heads: Sequence[Model]) -> None:
        """Encode with these heads as well from now on."""
        ...

    def offer(self, offers: Sequence[EncoderOffer]) -> None:
        """Offer these encoders from now on, if they are held. The others still encode."""
        ...

    async def drop(self) -> None:
        """Unload the encoders that are not offered, once the requests that use them have ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """The models of a node, loaded by the service: this package knows no way to load any."""

    ready: Sequence[Model]
    """Loaded models of distinct names, at least one."""
    standby: Mapping[str, Sequence[Model]] = field(default_factory=dict)
    """Models that load themselves with the first request for them, by the name of the one in `ready` as whose equals in
    speed they are offered."""
    guards: Mapping[str, Guard] = field(default_factory=dict)
    """Guards by model name, called with a request before it is computed."""
    engine: Engine | None = None
    """Computes them; None: the node's own process."""


class ModelKey(NamedTuple):
    """Identity of a version of a model: two with the same key give the same answers."""

    name: str
    sha256: str
    reading: str = ""
    """Digest of how it reads pictures; "" if it takes none."""

    @classmethod
    def of(cls, model: Model) -> ModelKey:
        """Key of a loaded model."""
        return cls(model.name, model.sha256, str(model.parameters.get("reading", "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Models and encoders that a node has loaded, so that they are not loaded again."""

    models: frozenset[ModelKey] = frozenset()
    encoders: frozenset[EncoderOffer] = frozenset()
    serving: bool = False
    """True if the node serves meanwhile. The load then gives way to other work, and an absent scheduler is an error."""
    copies: NetworkCopies | None = None
    """Gets files from other nodes of the fleet."""


NOTHING_LOADED = Loaded()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseParts:
    """Models and encoders of one release."""

    models: tuple[ModelKey, ...]
    """All of them, beginning with the network that answers by default."""
    encoders: tuple[EncoderOffer, ...] = ()
    served: ServedModels
    """Models that were not loaded before; `ready` may be empty, and `standby` may name a model loaded before."""
    heads: Sequence[Model] = ()
    """Heads of the encoders that were not loaded before."""


def _unchanged(it: _T) -> _T:
    return it


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitutes:
    """Replacements for a node's parts, such as models that are as slow as on another machine."""

    served: Callable[[ServedModels], ServedModels] = _unchanged
    head: Callable[[Model], Model] = _unchanged
    """Applied to each head of an encoder that the node holds."""
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = ()
    """Middlewares that the node's own requests pass through."""


NO_SUBSTITUTES = Substitutes()
