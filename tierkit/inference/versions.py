"""The models of a node, several versions of each next to one another."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from tierkit.errors import NotFound, Unavailable
from tierkit.inference.metrics import ModelMetrics
from tierkit.inference.model import Loadable
from tierkit.inference.runner import ModelRunner
from tierkit.inference.served import Guard, ModelKey
from tierkit.wire.messages import ModelOffer

__all__ = ["Gone", "UseCount", "Version", "Versions", "version_names"]

_DIGESTS = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{64})?")

_MOST_GONE = 64

_CLOSE_BUDGET_S = 60.0
"""Seconds for requests that still use a version which is taken away."""


class UseCount:
    """Counts the requests that use something, so that it is taken away after the last of them."""

    __slots__ = ("_count", "_unused")

    def __init__(self) -> None:
        self._count = 0
        self._unused: asyncio.Event | None = None

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_error: object) -> None:
        self._count -= 1
        if not self._count and self._unused is not None:
            self._unused.set()

    async def ended(self) -> None:
        """Return when no request uses it any more, or after a minute: then they are refused."""
        if not self._count:
            return
        self._unused = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_BUDGET_S):
                await self._unused.wait()


class Version:
    """One version of a model on a node.

    Args:
        runner: computes it.
        metrics: of its requests.
        guard: looks at each request before it is computed; None for no such look.
        like: version as whose equal in speed it is offered, while it is on standby; None if it is loaded.
    """

    __slots__ = ("guard", "key", "like", "metrics", "offer", "runner", "uses")

    def __init__(
        self, runner: ModelRunner, metrics: ModelMetrics, guard: Guard | None = None, like: Version | None = None
    ) -> None:
        self.runner = runner
        self.metrics = metrics
        self.guard = guard
        self.like = like
        self.key = ModelKey.of(runner.model)
        self.uses = UseCount()
        self.offer: ModelOffer | None = None
        """Its part of the registration; None until it is ready."""

    async def close(self) -> None:
        """Answer what waits and runs, then give the memory back."""
        await self.uses.ended()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_BUDGET_S):
                await self.runner.drained()
        await self.runner.__aexit__(None, None, None)
        if isinstance(self.runner.model, Loadable):
            await asyncio.to_thread(self.runner.model.unload)


class Gone:
    """Counts of runners that are not there any more, so that the node's own counts never fall."""

    def __init__(self) -> None:
        self.images_computed = 0
        self.answered_images: dict[str, int] = defaultdict(int)
        self.refused_requests: dict[str, int] = defaultdict(int)
        """Refused requests by share."""

    def add(self, runner: ModelRunner) -> None:
        """Count what a runner has counted."""
        self.images_computed += runner.images_computed
        for share, images in runner.answered_images.items():
            self.answered_images[share] += images
        for share, requests in runner.refused_requests.items():
            self.refused_requests[share] += requests

    def queued_images_of(self, _share: str) -> int:
        """Always none."""
        return 0


def version_names(key: ModelKey) -> tuple[str, ...]:
    """Names of a version in the protocol: its sha256, and with a dot and its reading after it."""
    return (key.sha256, f"{key.sha256}.{key.reading}") if key.reading else (key.sha256,)


class Versions:
    """The versions that a node holds. It changes on the event loop only, between two requests.

    A name without a version is the one of the first release, and so is a sha256 that two releases read differently.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None
        """Called after each change."""
        self._held: dict[ModelKey, Version] = {}
        self._order: tuple[Version, ...] = ()
        self._by_name: dict[str, Version] = {}
        self._by_version: dict[tuple[str, str], Version] = {}
        self._gone_names: deque[str] = deque(maxlen=_MOST_GONE)
        """Models of which a version has been taken away."""
        self.gone = Gone()
        """Counts of the versions that have been taken away."""

    @property
    def default(self) -> Version:
        """Version that answers if a request names no model."""
        return self._order[0]

    def __iter__(self) -> Iterator[Version]:
        """Versions that requests can find, in their order."""
        return iter(self._order)

    @property
    def held(self) -> Mapping[ModelKey, Version]:
        """All versions in memory, including those on their way in or out."""
        return self._held

    def add(self, version: Version) -> None:
        """Hold a version. Requests find it after the next `arrange`."""
        self._held[version.key] = version

    def arrange(self, keys: Sequence[ModelKey]) -> list[Version]:
        """Let requests find these versions from now on. Returns those that are held and not among them."""
        self._order = tuple(self._held[key] for key in dict.fromkeys(keys))
        self._by_name, self._by_version = {}, {}
        for version in self._order:
            name = version.key.name
            self._by_name.setdefault(name, version)
            for each in version_names(version.key):
                self._by_version.setdefault((name, each), version)
        self.changed()
        return [version for key, version in self._held.items() if key not in keys]

    def remove(self, version: Version) -> None:
        """Forget a version that has been closed."""
        if self._held.get(version.key) is version:
            del self._held[version.key]
        self.gone.add(version.runner)
        self._gone_names.append(version.key.name)

    @property
    def paths(self) -> Mapping[tuple[str, str | None], Version]:
        """Versions by name, and by name and version."""
        paths: dict[tuple[str, str | None], Version] = dict(self._by_version.items())
        paths.update({(name, None): version for name, version in self._by_name.items()})
        return paths

    def named(self, name: str) -> list[Version]:
        """All versions of a name that requests can find."""
        return [version for version in self._order if version.key.name == name]

    def find(self, name: str, version: str | None = None) -> Version:
        """The version that a request means.

        Args:
            version: see `version_names`; None for the one of the first release.

        Raises:
            NotFound: no such model.
            Unavailable: no such version here now.
        """
        found = self._by_name.get(name) if version is None else self._by_version.get((name, version))
        if found is not None:
            return found
        known = name in self._by_name or name in self._gone_names
        if known and version is not None and _DIGESTS.fullmatch(version):
            raise Unavailable(f"this node does not hold version {version} of '{name[:100]}' now")
        if name not in self._by_name:
            raise NotFound(f"no model {name[:100]!r} here; this node serves {', '.join(self._by_name) or 'none'}")
        have = "', '".join(each.key.sha256 for each in self.named(name))
        assert version is not None
        raise NotFound(f"model '{name}' has no version {version[:100]!r}, only '{have}'")

    def of_network(self, network: str) -> Version:
        """The version of a network by its sha256, or by its sha256, a dot and its reading.

        Raises:
            Unavailable: no such version here now.
        """
        for version in self._order:
            if network in version_names(version.key):
                return version
        raise Unavailable(f"this node does not hold the network {network[:130]} now")
