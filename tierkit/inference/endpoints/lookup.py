"""Which model a request means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from starlette.types import Scope

from tierkit.errors import NotFound
from tierkit.inference.runner import ModelRunner

__all__ = ["Models"]


class Models:
    """The models of a node, found by the path parameters `model` and, where given, `version`."""

    def __init__(self, runners: Mapping[str, ModelRunner]) -> None:
        self._runners = runners

    def __iter__(self) -> Iterator[ModelRunner]:
        return iter(self._runners.values())

    def runner(self, scope: Scope) -> ModelRunner:
        """The runner that this request is for.

        Raises:
            NotFound: no such model, or not in this version.
        """
        name: str = scope["path_params"]["model"]
        runner = self._runners.get(name)
        if runner is None:
            raise NotFound(f"no model {name[:100]!r} here; this node serves {', '.join(self._runners) or 'none'}")
        version: str = scope["path_params"].get("version", runner.model.sha256)
        if version != runner.model.sha256:
            raise NotFound(f"model '{name}' has no version {version[:100]!r}, only '{runner.model.sha256}'")
        return runner
