"""Look up the model that a request means."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.types import Scope

from tierkit.inference.runner import ModelRunner
from tierkit.inference.versions import Version, Versions

__all__ = ["Models"]


class Models:
    """The models of a node, found by the path parameters `model` and, where given, `version`."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def __iter__(self) -> Iterator[ModelRunner]:
        return (version.runner for version in self._versions)

    def version(self, scope: Scope) -> Version:
        """The version that this request is for.

        Raises:
            NotFound: no such model, or it never had this version.
            Unavailable: not here in this version now.
        """
        parameters = scope["path_params"]
        return self._versions.find(parameters["model"], parameters.get("version"))

    def runner(self, scope: Scope) -> ModelRunner:
        """The runner of the same."""
        return self.version(scope).runner

    def versions(self, name: str) -> list[str]:
        """The sha256 of all versions of a model."""
        return list(dict.fromkeys(version.key.sha256 for version in self._versions.named(name)))
