"""A replica of the engine `ray`, in a process of the cluster: it computes the logits of pieces of batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from models.manifest import ModelEntry
from models.session import OnnxModel, open_session
from models.split import Part
from tierkit.tensors import Array

__all__ = ["Content", "Replica"]


@dataclass(frozen=True, kw_only=True)
class Content:
    """A network, or the tail of one, as it is sent to the replicas."""

    entry: ModelEntry
    part: Part
    takes: str
    """Name of its input."""
    network: bytes
    """The ONNX file, cut to the part."""
    at_once: bool
    """True if it is loaded with the replica; else with the first piece for it."""
    provider: str
    threads: int

    @cached_property
    def model(self) -> OnnxModel:
        """Loaded when it is first asked for."""
        opened = partial(open_session, self.network, self.entry.name, provider=self.provider)
        return OnnxModel(self.entry, self.part, self.entry.sha256, opened, (), self.provider, threads=self.threads)


class Replica:
    """Args: contents: a list of one reference to the contents by model name. Ray would resolve a reference outside a
    list.
    """

    def __init__(self, contents: list[Any]) -> None:
        import ray

        self._contents: dict[str, Content] = ray.get(contents[0])
        for content in self._contents.values():
            if content.at_once:
                _ = content.model

    def compute(self, model: str, piece: Array) -> Array:
        """The logits of a piece."""
        content = self._contents[model]
        return content.model.run({content.takes: piece}, ["logits"])["logits"]
